// Kernels from outside the library: C functions of an engine's own libraries (every thread calls them),
// and functions of the host program (thread 0 does, while the others wait at the barrier).
#include "kernel_util.h"
#include "pool.h"

namespace {

void library(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_kernel_args args = {c->in,   c->out,   c->attrs, c->workspace, c->workspace_bytes,
                                   c->n_in, c->n_out, c->n_attrs, thread, pelton_team_size(team)};
  ((pelton_external_kernel)c->function)(&args);
}

void host(const pelton_call* c, pelton_team* team, int thread) {
  if (thread == 0 && ((pelton_host_function)c->function)(c)) pelton_team_fail(team);
}

}  // namespace

PELTON_KERNEL("external.library", PELTON_GENERIC, library);
PELTON_KERNEL("external.host", PELTON_GENERIC, host);
