#include "worker.h"

void layers_facts(struct worker *w)
{
    (void)w;
}
