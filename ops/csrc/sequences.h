// The rows of a ragged batch by sequence, for ops whose rows go on from a state.
#pragma once
#include <algorithm>
#include <vector>

#include "binding.h"

namespace dasllama {

struct Sequences {
  struct One {
    int64_t state;  // which of the states
    const int64_t* rows;
    int64_t n;
  };
  std::vector<int64_t> order;  // live rows by sequence, within one as they stand in the batch
  std::vector<One> all;

  // ids int32 [T]: the state of each row's sequence, or -1 for an inert row.
  Sequences(const int32_t* ids, int64_t T) {
    for (int64_t t = 0; t < T; t++)
      if (ids[t] >= 0) order.push_back(t);
    const auto earlier = [&](int64_t a, int64_t b) { return ids[a] < ids[b]; };
    if (!std::is_sorted(order.begin(), order.end(), earlier)) std::stable_sort(order.begin(), order.end(), earlier);
    const int64_t n = static_cast<int64_t>(order.size());
    for (int64_t i = 0, j; i < n; i = j) {
      for (j = i + 1; j < n && ids[order[j]] == ids[order[i]];) j++;
      all.push_back({ids[order[i]], order.data() + i, j - i});
    }
  }
};

// ids must be contiguous int32 [T]; what stands in them is for `check_ids`.
inline const int32_t* ids_of(const char* op, const char* name, const Tensor& ids, int64_t T) {
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Int && ids.dim() == 1 && ids.size(0) == T && ids.is_contiguous(),
                  "dasllama::", op, ": ", name, " must be contiguous int32 [", T, "], found ",
                  toString(ids.scalar_type()), " with ", ids.numel(), " elements");
  return ids.const_data_ptr<int32_t>();
}

// Each of T ids must be -1 to states - 1.
inline void check_ids(const char* op, const char* name, const int32_t* ids, int64_t T, int64_t states) {
  for (int64_t t = 0; t < T; t++)
    STD_TORCH_CHECK(ids[t] >= -1 && ids[t] < states, "dasllama::", op, ": ", name, "[", t, "] is ", ids[t],
                    ", wanted -1 (inert) to ", states - 1);
}

}  // namespace dasllama
