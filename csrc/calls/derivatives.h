// Refuses inputs that are differentiated, for the ops of every step of a model.
//
// The stable ABI cannot ask whether a tensor requires a gradient. A kernel in Python at the Autograd dispatch key can,
// but costs as much as the rest of a call. The ops of a step therefore have none there: their compiled kernels ask two
// questions that are cheap, whether grad mode is on and whether the thread is in forward mode, and only then have
// Python look at the tensors. torch_turboquant/_autograd.py is the other half, and has what torch.func needs.
#pragma once

#include <atomic>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace turboquant {

// Whether the thread is in a level of forward mode. Python sets it, once for each library; null: nobody differentiates.
using InForwardMode = int();
inline std::atomic<InForwardMode*> in_forward_mode{nullptr};

inline bool may_be_differentiated() {
  InForwardMode* const ask = in_forward_mode.load(std::memory_order_relaxed);
  return ask && (aoti_torch_grad_mode_is_enabled() || ask());
}

// The tensors of a call that can have a derivative. They are borrowed.
class Differentiable {
 public:
  void add(AtenTensorHandle tensor) {
    bool defined = false;
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(tensor, &defined));
    if (!defined) return;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    const bool integer = dtype == aoti_torch_dtype_uint8() || dtype == aoti_torch_dtype_int8() ||
                         dtype == aoti_torch_dtype_int32() || dtype == aoti_torch_dtype_int64();
    if (!integer) tensors_.push_back(tensor);
  }

  // op: its name, for the message.
  void refuse(const char* op) const {
    StableListHandle list = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(tensors_.size(), &list));
    for (AtenTensorHandle tensor : tensors_) {
      AtenTensorHandle owned = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &owned));
      TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, torch::stable::detail::from(owned)));
    }
    StableIValue stack[] = {torch::stable::detail::from(list)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("_turboquant::derivative_of", "", stack, TORCH_ABI_VERSION));
    const int64_t found = torch::stable::detail::to<int64_t>(stack[0]);
    STD_TORCH_CHECK(found != kGradient, "turboquant::", op,
                    " takes no gradient: call it under torch.no_grad() or detach its inputs");
    STD_TORCH_CHECK(found != kTangent, "turboquant::", op, " takes no forward-mode tangent: detach its inputs");
  }

 private:
  // What _turboquant::derivative_of answers, besides 0.
  static constexpr int64_t kGradient = 1, kTangent = 2;

  std::vector<AtenTensorHandle> tensors_;
};

}  // namespace turboquant
