#include "worker.h"

void limits_facts(struct worker *w)
{
    (void)w;
}
