"""Cells of a notebook: a pool without ``with``, a look into a sandbox, and how long a claim takes."""

import rlsandbox as rls

# A pool of four ready sandboxes on this machine.
pool = rls.Pool(size=4)
task = rls.load_tasks("demo")[0]
pool.expect([task], group_size=4)
pool.wait_ready(timeout=30)

# What the acting agent would see.
sandbox = pool.claim(task, timeout=30)
result = sandbox.run("ls -la && cat *.py", timeout=10)
print(result.stdout)
assert "def" in result.stdout
print(sandbox.read_text("calc.py"))
sandbox.release()

# Twenty claims of a warm pool, each sandbox clean again.
for _ in range(20):
    with pool.claim(task, timeout=30) as sandbox:
        sandbox.run("echo dirt > calc.py")

pool.metrics.ttfc.plot()
print("TTFC p95:", pool.metrics.ttfc.summary().p95, "s;", pool.stats())
pool.close()
