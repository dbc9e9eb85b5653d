// ISA levels of this CPU, from cpuid and what the operating system saves (xgetbv).
#include <stdlib.h>
#include <string.h>

#include "pelton.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

const char* const kNames[PELTON_LEVELS] = {"generic", "avx2", "avxvnni", "avx512", "avx512bf16"};

unsigned detect() {
  unsigned levels = 1u << PELTON_GENERIC;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return levels;
  const bool osxsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
  if (!osxsave) return levels;
  unsigned xcr0, high;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  const bool ymm = (xcr0 & 0x06) == 0x06, zmm = (xcr0 & 0xe6) == 0xe6;
  unsigned b7, c7, a71 = 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return levels;
  if (a >= 1 && __get_cpuid_count(7, 1, &a71, &b, &c, &d) == 0) a71 = 0;
  const bool avx2 = b7 >> 5 & 1, bmi2 = b7 >> 8 & 1;
  if (!(ymm && avx2 && fma && f16c && bmi2)) return levels;
  levels |= 1u << PELTON_AVX2;
  if (a71 >> 4 & 1) levels |= 1u << PELTON_AVXVNNI;
  const bool f = b7 >> 16 & 1, dq = b7 >> 17 & 1, bw = b7 >> 30 & 1, vl = b7 >> 31 & 1;
  const bool vnni = c7 >> 11 & 1;
  if (zmm && f && dq && bw && vl && vnni) {
    levels |= 1u << PELTON_AVX512;
    if (a71 >> 5 & 1) levels |= 1u << PELTON_AVX512BF16;
  }
#endif
  return levels;
}

// Levels in use: the CPU's, up to PELTON_CPU_LEVEL.
unsigned levels() {
  static const unsigned value = [] {
    unsigned found = detect();
    const char* cap = getenv("PELTON_CPU_LEVEL");
    for (int i = 0; cap && i < PELTON_LEVELS; i++)
      if (!strcmp(cap, kNames[i])) found &= (2u << i) - 1;
    return found;
  }();
  return value;
}

}  // namespace

extern "C" {

int pelton_abi_version(void) { return PELTON_ABI_VERSION; }

const char* pelton_level_name(int level) {
  return level >= 0 && level < PELTON_LEVELS ? kNames[level] : NULL;
}

int pelton_has_level(int level) {
  return level >= 0 && level < PELTON_LEVELS && (levels() >> level & 1);
}

const char* pelton_cpu_level(void) {
  int best = PELTON_GENERIC;
  for (int i = 0; i < PELTON_LEVELS; i++)
    if (pelton_has_level(i)) best = i;
  return kNames[best];
}

}  // extern "C"
