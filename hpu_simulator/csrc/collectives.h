// The two backends of torch.distributed that this device has.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

namespace simulator {

// "hccl": the collectives of `inner` (gloo) over the memory of the device's tensors.
c10::intrusive_ptr<c10d::Backend> wrap_backend(const c10::intrusive_ptr<c10d::Backend>& inner);

// One rank of `size` without the others, for tensors of the device and of the host: every collective ends at once, as
// if all ranks had this one's values.
c10::intrusive_ptr<c10d::Backend> lone_backend(const std::string& name, int rank, int size);

}  // namespace simulator
