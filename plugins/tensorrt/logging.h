// Where the wrappers say why they refuse something.
#pragma once

#include <stdexcept>
#include <string>

#include "abi.h"

namespace dflash::trt {

// A request the plugins cannot serve; the text says what was found and what was expected. It never leaves the library:
// every entry point that TensorRT calls catches and logs it.
struct Refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] void refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// To TensorRT's logger where setLoggerFinder was called, else to stderr; also kept for dflash_last_error().
void log_error(const std::string& text);

// Only to TensorRT's logger: TensorRT probes formats that it may never use.
void log_verbose(const std::string& text);

void use_logger_finder(abi::ILoggerFinder* finder);

}  // namespace dflash::trt
