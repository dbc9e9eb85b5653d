// The threads of a team. One parallel region (a step) at a time; kernels see pelton_team only.
#pragma once
#include "pelton.h"

typedef void (*pelton_region)(void* arg, pelton_team* team, int thread);

// Run `region` on every thread of the team, the caller being thread 0; ends with a barrier.
// PELTON_OK, PELTON_ERROR_BUSY or PELTON_ERROR_FORKED (then nothing ran), or PELTON_ERROR_HOST.
extern "C" int pelton_team_run(pelton_team* team, pelton_region region, void* arg);
// Let this region end with PELTON_ERROR_HOST.
void pelton_team_fail(pelton_team* team);
// Whether a thread had failed before the last barrier: until the next one, the same for every thread, so
// that all leave the region at the same place or none does.
bool pelton_team_stopped(const pelton_team* team);
