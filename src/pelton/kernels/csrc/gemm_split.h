// How panels are dealt to threads: first one large range each (long streams), then the rest in small
// pieces, so that a thread that was held up leaves its share to the others. Few tokens wait for memory, and a thread
// fetches ahead what then goes to another: for them the large ranges are 7/8 of all, for more tokens 5/8.
#pragma once
#include "pelton.h"

namespace {

struct Split {
  int64_t n, large, small, large_count, claims;

  Split(int64_t total, int threads, bool few_tokens) : n(total) {
    large = total * (few_tokens ? 7 : 5) / 8 / threads;
    large_count = large > 0 ? threads : 0;
    const int64_t rest = total - large * large_count;
    small = rest / (8 * threads);
    if (small < 1) small = 1;
    claims = large_count + (rest + small - 1) / small;
  }
  // The next range [lo, hi); false: none is left.
  bool claim(pelton_team* team, int64_t& lo, int64_t& hi) const {
    const int64_t c = pelton_claim(team, claims);
    if (c < 0) return false;
    if (c < large_count) {
      lo = c * large;
      hi = lo + large;
    } else {
      lo = large * large_count + (c - large_count) * small;
      hi = lo + small < n ? lo + small : n;
    }
    return true;
  }
};

}  // namespace
