#include "logging.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "launch.h"

namespace dflash::trt {
namespace {

std::atomic<abi::ILoggerFinder*> logger_finder{nullptr};

bool log_to_tensorrt(abi::ILogger::Severity severity, const std::string& text) {
    abi::ILoggerFinder* finder = logger_finder.load();
    abi::ILogger* logger = finder ? finder->findLogger() : nullptr;
    if (logger) logger->log(severity, text.c_str());
    return logger != nullptr;
}

}  // namespace

void refuse(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    throw Refusal(text);
}

void log_error(const std::string& text) {
    fail(DFLASH_INVALID_ARGUMENT, "%s", text.c_str());
    if (!log_to_tensorrt(abi::ILogger::Severity::kERROR, text)) fprintf(stderr, "%s\n", text.c_str());
}

void log_verbose(const std::string& text) { log_to_tensorrt(abi::ILogger::Severity::kVERBOSE, text); }

void use_logger_finder(abi::ILoggerFinder* finder) { logger_finder.store(finder); }

}  // namespace dflash::trt
