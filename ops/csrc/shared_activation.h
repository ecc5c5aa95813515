// One rounding of an activation for several weights.
#pragma once
#include <optional>

#include "activation_scratch.h"

namespace dasllama {

// The rows of x that a thread rounded last, kept for the next weight that takes the same x: q, k and v, gate and up. On
// only while whoever began knows that nobody writes to x in between (`dasllama_share_activations`).
class SharedActivation {
 public:
  // Of the calling thread; null while nothing is shared.
  static SharedActivation* current();

  // The scratch that holds x for this lattice, group and bias, or null.
  const ActivationScratch* find(const Tensor& x, int64_t K, int lattice, IntTraits traits) const {
    const bool is_same = x_ && x_->const_data_ptr() == x.const_data_ptr() && x_->numel() == x.numel() && scratch_->K == K &&
                         lattice_ == lattice && traits_.group == traits.group && traits_.bias == traits.bias;
    return is_same ? &*scratch_ : nullptr;
  }
  // Keeps x too, so that no other tensor comes to lie there.
  void keep(const Tensor& x, int lattice, IntTraits traits, const ActivationScratch& scratch) {
    x_ = x, lattice_ = lattice, traits_ = traits, scratch_.emplace(scratch);
  }

 private:
  std::optional<Tensor> x_;
  int lattice_ = 0;
  IntTraits traits_ = {};
  std::optional<ActivationScratch> scratch_;
};

}  // namespace dasllama
