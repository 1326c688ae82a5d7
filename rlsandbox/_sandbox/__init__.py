"""What a user holds, in parts; :mod:`rlsandbox.sandbox` gives the public names."""
