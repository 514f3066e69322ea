// A case of the plugin harness: a plugin, its fields, its tensors and what must come out, as write_cases.py wrote it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi.h"

namespace harness {

namespace abi = dflash::abi;

struct Field {
    std::string name;
    bool is_integer;
    std::vector<int32_t> integers;
    std::vector<float> reals;
};

struct Tensor {
    std::string name;
    abi::DataType type;
    abi::Dims dims;
    int alias = -1;                           // outputs: index of the input it is written in place of
    std::vector<char> bytes;                  // inputs
    std::vector<double> expected, tolerance;  // outputs; a NaN tolerance is a value of no meaning

    int64_t count() const {
        int64_t count = 1;
        for (int i = 0; i < dims.nbDims; ++i) count *= dims.d[i];
        return count;
    }
};

struct Case {
    std::string name, plugin;
    std::vector<Field> fields;
    std::vector<Tensor> inputs, outputs;
};

inline abi::DataType type_named(const std::string& name) {
    if (name == "float32") return abi::DataType::kFLOAT;
    if (name == "float16") return abi::DataType::kHALF;
    if (name == "bfloat16") return abi::DataType::kBF16;
    if (name == "float8_e4m3fn") return abi::DataType::kFP8;
    if (name == "int32") return abi::DataType::kINT32;
    if (name == "int64") return abi::DataType::kINT64;
    throw std::runtime_error("unknown type " + name);
}

inline int64_t bytes_of(abi::DataType type) {
    switch (type) {
        case abi::DataType::kINT64:
            return 8;
        case abi::DataType::kFLOAT:
        case abi::DataType::kINT32:
            return 4;
        case abi::DataType::kFP8:
            return 1;
        default:
            return 2;
    }
}

inline double decoded(abi::DataType type, const char* element) {
    const auto as = [&](auto value) {
        memcpy(&value, element, sizeof(value));
        return value;
    };
    switch (type) {
        case abi::DataType::kINT64:
            return double(as(int64_t{}));
        case abi::DataType::kINT32:
            return double(as(int32_t{}));
        case abi::DataType::kFLOAT:
            return double(as(float{}));
        case abi::DataType::kBF16:
            return double(__bfloat162float(as(__nv_bfloat16{})));
        case abi::DataType::kHALF:
            return double(__half2float(as(__half{})));
        case abi::DataType::kFP8:
            return double(__half2float(__half(__nv_cvt_fp8_to_halfraw(as(__nv_fp8_storage_t{}), __NV_E4M3))));
        default:
            throw std::runtime_error("cannot decode");
    }
}

inline std::vector<char> read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<double> read_doubles(const std::string& path, int64_t count) {
    const std::vector<char> bytes = read_bytes(path);
    if (static_cast<int64_t>(bytes.size()) != count * 8) throw std::runtime_error(path + " has another size");
    std::vector<double> values(count);
    memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}

// Lines of case.txt: `plugin NAME`, `int NAME V`, `real NAME V…`, `input NAME TYPE d0,d1,…`,
// `output NAME TYPE d0,d1,… ALIAS`. Tensors are NAME.bin, NAME.expected.bin and NAME.tolerance.bin beside it.
inline Case read_case(const std::string& folder) {
    Case read;
    read.name = folder.substr(folder.find_last_of('/') + 1);
    std::ifstream file(folder + "/case.txt");
    if (!file) throw std::runtime_error("cannot read " + folder + "/case.txt");
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string kind, name;
        words >> kind >> name;
        if (kind == "plugin") {
            read.plugin = name;
        } else if (kind == "int" || kind == "real") {
            Field field{name, kind == "int", {}, {}};
            for (double value; words >> value;)
                field.is_integer ? field.integers.push_back(int32_t(value)) : field.reals.push_back(float(value));
            read.fields.push_back(field);
        } else {
            Tensor tensor{name, {}, {}, -1, {}, {}, {}};
            std::string type, shape;
            words >> type >> shape;
            tensor.type = type_named(type);
            std::istringstream sizes(shape);
            for (std::string size; std::getline(sizes, size, ',');)
                tensor.dims.d[tensor.dims.nbDims++] = std::stoll(size);
            const std::string path = folder + "/" + name;
            if (kind == "input") {
                tensor.bytes = read_bytes(path + ".bin");
                if (static_cast<int64_t>(tensor.bytes.size()) != tensor.count() * bytes_of(tensor.type))
                    throw std::runtime_error(path + ".bin has another size");
                read.inputs.push_back(tensor);
            } else {
                words >> tensor.alias;
                tensor.expected = read_doubles(path + ".expected.bin", tensor.count());
                tensor.tolerance = read_doubles(path + ".tolerance.bin", tensor.count());
                read.outputs.push_back(tensor);
            }
        }
    }
    return read;
}

// "" when `bytes` hold what is expected, else the worst element.
inline std::string compare(const Tensor& tensor, const std::vector<char>& bytes) {
    double worst = 0;
    int64_t where = -1;
    for (int64_t i = 0; i < tensor.count(); ++i) {
        const double tolerance = tensor.tolerance[i], expected = tensor.expected[i];
        if (std::isnan(tolerance)) continue;
        const double found = decoded(tensor.type, bytes.data() + i * bytes_of(tensor.type));
        const bool same = found == expected || (std::isnan(found) && std::isnan(expected));
        const double excess = same ? 0 : std::abs(found - expected) - tolerance;
        if (!(excess <= worst)) worst = std::isnan(excess) ? INFINITY : excess, where = i;
    }
    if (where < 0) return "";
    std::ostringstream text;
    text << tensor.name << "[" << where << "] is " << decoded(tensor.type, bytes.data() + where * bytes_of(tensor.type))
         << ", expected " << tensor.expected[where] << " within " << tensor.tolerance[where];
    return text.str();
}

}  // namespace harness
