// Identity of the library: ABI version, what was compiled, and the failure text of the calling thread.
#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "launch.h"

#ifndef DFLASH_SM_LIST
#define DFLASH_SM_LIST ""
#endif
#ifndef DFLASH_VERSION
#define DFLASH_VERSION "unversioned"
#endif

namespace dflash {
namespace {

thread_local char last_error[512] = "";

// Function-local statics: registrations run before main() in an order nobody controls.
std::vector<std::string>& names_of(bool plugin) {
    static std::vector<std::string> kernels, plugins;
    return plugin ? plugins : kernels;
}

std::string json_list(const std::vector<std::string>& names) {
    std::string text = "[";
    for (size_t i = 0; i < names.size(); ++i) text += (i ? ", \"" : "\"") + names[i] + "\"";
    return text + "]";
}

}  // namespace

int32_t fail(int32_t status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof(last_error), format, arguments);
    va_end(arguments);
    return status;
}

int32_t check_launch(const char* what) {
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return DFLASH_OK;
    return fail(DFLASH_CUDA_ERROR, "%s: %s (%s); library compiled for SM %s", what, cudaGetErrorString(error),
                cudaGetErrorName(error), DFLASH_SM_LIST);
}

Registration::Registration(const char* kind, const char* name) { names_of(kind[0] == 'p').emplace_back(name); }

int multiprocessor_count() {
    constexpr int kMaxDevices = 64;
    static int counts[kMaxDevices] = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return 0;
    if (counts[device] == 0) cudaDeviceGetAttribute(&counts[device], cudaDevAttrMultiProcessorCount, device);
    return counts[device];
}

}  // namespace dflash

int32_t dflash_abi_version(void) { return DFLASH_ABI_VERSION; }

const char* dflash_last_error(void) { return dflash::last_error; }

const char* dflash_library_info(void) {
    static const std::string info = [] {
        std::string sms = "[";
        for (const char* c = DFLASH_SM_LIST; *c; ++c) sms += *c == ' ' ? std::string("\", \"") : std::string(1, *c);
        sms = sms == "[" ? "[]" : "[\"" + sms.substr(1) + "\"]";
        return std::string("{\"version\": \"") + DFLASH_VERSION + "\", \"abi\": " + std::to_string(DFLASH_ABI_VERSION) +
               ", \"cuda\": \"" + std::to_string(CUDART_VERSION / 1000) + "." +
               std::to_string(CUDART_VERSION % 1000 / 10) + "\", \"sm\": " + sms +
               ", \"kernels\": " + dflash::json_list(dflash::names_of(false)) +
               ", \"plugins\": " + dflash::json_list(dflash::names_of(true)) + "}";
    }();
    return info.c_str();
}
