// The kernels of all levels: the linker gathers every PELTON_KERNEL row into one section.
#include <string.h>

#include "kernel_util.h"

extern "C" {

extern const pelton_kernel_row* __start_pelton_kernels[] __attribute__((visibility("hidden")));
extern const pelton_kernel_row* __stop_pelton_kernels[] __attribute__((visibility("hidden")));

int pelton_kernel_info(int i, const char** name, int* level) {
  if (i < 0 || i >= __stop_pelton_kernels - __start_pelton_kernels) return -1;
  *name = __start_pelton_kernels[i]->name;
  *level = __start_pelton_kernels[i]->level;
  return 0;
}

pelton_kernel pelton_find_kernel_at(const char* name, int level) {
  if (!pelton_has_level(level)) return NULL;
  for (const pelton_kernel_row** row = __start_pelton_kernels; row < __stop_pelton_kernels; row++)
    if ((*row)->level == level && !strcmp((*row)->name, name)) return (*row)->fn;
  return NULL;
}

pelton_kernel pelton_find_kernel(const char* name) {
  for (int level = PELTON_LEVELS - 1; level >= 0; level--)
    if (pelton_kernel fn = pelton_find_kernel_at(name, level)) return fn;
  return NULL;
}

}  // extern "C"
