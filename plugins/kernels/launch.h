// What every launch function shares: the failure text of the calling thread and the list of what the library holds.
#pragma once

#include <cuda_runtime.h>

#include "dflash_kernels.h"

namespace dflash {

// Stores a printf-style message for dflash_last_error() and returns `status`, so that callers write
// `return fail(DFLASH_INVALID_ARGUMENT, "…")`.
int32_t fail(int32_t status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Turns the error state of the launch just made into a status; `what` names the kernel.
int32_t check_launch(const char* what);

// A file-scope object adds one name to dflash_library_info() when the library is loaded. `kind` is "kernel" or
// "plugin".
struct Registration {
    Registration(const char* kind, const char* name);
};

// Multiprocessors of the current device, read once per device.
int multiprocessor_count();

}  // namespace dflash

#define DFLASH_REGISTER_KERNEL(identifier, name) \
    static const ::dflash::Registration registration_##identifier("kernel", name)
#define DFLASH_REGISTER_PLUGIN(identifier, name) \
    static const ::dflash::Registration registration_##identifier("plugin", name)
