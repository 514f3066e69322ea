// Leads each plugin through its life as TensorRT does, without TensorRT: build, serialise, load, attach, run, clone.
//
//   plugin_harness LIBRARY CASE_FOLDER…
//
// The cases come from write_cases.py. With a GPU, enqueue runs directly and from a clone inside a CUDA graph, outputs
// and workspace poisoned, and is compared with the expected values; without one, enqueue must report its failure.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdio>
#include <functional>

#include "plugin_case.h"
#include "plugin_host.h"

namespace harness {
namespace {

Log logger;
bool has_gpu = false;

void require(bool holds, const std::string& what) {
    if (holds) return;
    const std::string reason = logger.take_error();
    throw std::runtime_error(what + (reason.empty() ? "" : " (logged: " + reason + ")"));
}

void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// A call that must fail, and must say why.
void require_refusal(bool refused, const std::string& what) {
    require(refused, what + " was accepted");
    require(!logger.take_error().empty(), what + " was refused without a logged reason");
}

struct Capabilities {
    explicit Capabilities(abi::IPluginV3* plugin) : plugin(plugin) {
        const auto as = [&](abi::PluginCapabilityType type, const char* kind) {
            abi::IPluginCapability* capability = plugin->getCapabilityInterface(type);
            require(capability && std::string(capability->getInterfaceInfo().kind) == kind, std::string("no ") + kind);
            return capability;
        };
        // What TensorRT does after reading the kind string: the capability is taken for that interface.
        core = static_cast<abi::IPluginV3OneCore*>(as(abi::PluginCapabilityType::kCORE, "PLUGIN_V3ONE_CORE"));
        build = static_cast<abi::IPluginV3OneBuildV2*>(as(abi::PluginCapabilityType::kBUILD, "PLUGIN_V3ONE_BUILD"));
        runtime =
            static_cast<abi::IPluginV3OneRuntime*>(as(abi::PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME"));
        require(std::string(plugin->getInterfaceInfo().kind) == "PLUGIN", "IPluginV3 has another kind");
        require(build->getInterfaceInfo().major == 2, "the build capability has no getAliasedInput");
    }
    abi::IPluginV3* plugin;
    abi::IPluginV3OneCore* core;
    abi::IPluginV3OneBuildV2* build;
    abi::IPluginV3OneRuntime* runtime;
};

abi::IPluginCreatorV3One* creator_of(abi::IPluginCreatorInterface* const* creators, int32_t count,
                                     const std::string& name) {
    for (int32_t i = 0; i < count; ++i) {
        require(std::string(creators[i]->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE", "creator kind");
        auto* creator = static_cast<abi::IPluginCreatorV3One*>(creators[i]);
        if (name == creator->getPluginName()) return creator;
    }
    throw std::runtime_error("no creator of " + name);
}

abi::IPluginV3* create(abi::IPluginCreatorV3One* creator, const std::vector<Field>& given, abi::TensorRTPhase phase) {
    std::vector<abi::PluginField> fields;
    for (const Field& field : given)
        fields.push_back(field.is_integer
                             ? abi::PluginField{field.name.c_str(), field.integers.data(), abi::PluginFieldType::kINT32,
                                                int32_t(field.integers.size())}
                             : abi::PluginField{field.name.c_str(), field.reals.data(), abi::PluginFieldType::kFLOAT32,
                                                int32_t(field.reals.size())});
    const abi::PluginFieldCollection collection{int32_t(fields.size()), fields.data()};
    return creator->createPlugin("layer", &collection, phase);
}

std::vector<Field> serialised(abi::IPluginV3OneRuntime* runtime) {
    const abi::PluginFieldCollection* collection = runtime->getFieldsToSerialize();
    require(collection != nullptr, "nothing to serialise");
    std::vector<Field> fields;
    for (int32_t i = 0; i < collection->nbFields; ++i) {
        const abi::PluginField& from = collection->fields[i];
        Field field{from.name, from.type == abi::PluginFieldType::kINT32, {}, {}};
        if (field.is_integer) field.integers.assign((const int32_t*)from.data, (const int32_t*)from.data + from.length);
        else field.reals.assign((const float*)from.data, (const float*)from.data + from.length);
        fields.push_back(field);
    }
    return fields;
}

class Life {
public:
    Life(const Case& given, abi::IPluginCreatorV3One* creator) : case_(given), creator_(creator) {
        for (const auto* side : {&case_.inputs, &case_.outputs})
            for (const Tensor& tensor : *side) {
                const abi::PluginTensorDesc desc{tensor.dims, tensor.type, abi::TensorFormat::kLINEAR, 1.0f};
                descriptions_.push_back(desc);
                dynamic_.push_back({desc, tensor.dims, tensor.dims, tensor.dims});
            }
    }

    void lead() {
        abi::IPluginV3* built = create(creator_, case_.fields, abi::TensorRTPhase::kBUILD);
        require(built != nullptr, "createPlugin");
        Capabilities building(built);
        ask_about_types_and_shapes(building);
        workspace_bytes_ =
            building.build->getWorkspaceSize(dynamic_.data(), inputs(), dynamic_.data() + inputs(), outputs());
        require(building.build->configurePlugin(dynamic_.data(), inputs(), dynamic_.data() + inputs(), outputs()) == 0,
                "configurePlugin");
        const std::string identity = building.build->getTimingCacheID();
        const std::vector<Field> fields = serialised(building.runtime);
        delete built;

        std::vector<Field> other_version = fields;
        require(other_version.front().name == "version", "the version is not serialised first");
        other_version.front().integers.front() += 1;
        require_refusal(!create(creator_, other_version, abi::TensorRTPhase::kRUNTIME), "another field version");

        abi::IPluginV3* loaded = create(creator_, fields, abi::TensorRTPhase::kRUNTIME);
        require(loaded != nullptr, "createPlugin in the runtime phase");
        require(identity == Capabilities(loaded).build->getTimingCacheID(), "serialising changed a field");
        Capabilities attached(Capabilities(loaded).runtime->attachToContext(nullptr));
        delete loaded;
        change_shapes(attached.runtime);
        has_gpu ? run(attached) : fail_without_gpu(attached.runtime);
        delete attached.plugin;
    }

private:
    int32_t inputs() const { return int32_t(case_.inputs.size()); }
    int32_t outputs() const { return int32_t(case_.outputs.size()); }

    void ask_about_types_and_shapes(const Capabilities& of) {
        require(of.core->getPluginName() == case_.plugin && std::string(of.core->getPluginVersion()) == "1" &&
                    std::string(of.core->getPluginNamespace()).empty(),
                "name, version or namespace");
        require(of.build->getNbOutputs() == outputs(), "number of outputs");

        std::vector<abi::DataType> in, out(outputs());
        for (const Tensor& tensor : case_.inputs) in.push_back(tensor.type);
        require(of.build->getOutputDataTypes(out.data(), outputs(), in.data(), inputs()) == 0, "getOutputDataTypes");
        for (int i = 0; i < outputs(); ++i)
            require(out[i] == case_.outputs[i].type, "type of " + case_.outputs[i].name);
        for (int i = 0; i < inputs(); ++i) {
            std::vector<abi::DataType> wrong = in;
            wrong[i] = abi::DataType::kBOOL;
            require_refusal(of.build->getOutputDataTypes(out.data(), outputs(), wrong.data(), inputs()) != 0,
                            "bool for " + case_.inputs[i].name);
        }
        require_refusal(of.build->getOutputDataTypes(out.data(), outputs(), in.data(), inputs() - 1) != 0,
                        "a missing input");

        ExpressionBuilder builder;
        std::vector<abi::DimsExprs> shapes_in(inputs()), shapes_out(outputs());
        for (int i = 0; i < inputs(); ++i) {
            shapes_in[i].nbDims = case_.inputs[i].dims.nbDims;
            for (int j = 0; j < shapes_in[i].nbDims; ++j)
                shapes_in[i].d[j] = builder.constant(case_.inputs[i].dims.d[j]);
        }
        require(of.build->getOutputShapes(shapes_in.data(), inputs(), nullptr, 0, shapes_out.data(), outputs(),
                                          builder) == 0,
                "getOutputShapes");
        for (int i = 0; i < outputs(); ++i) {
            const abi::Dims& dims = case_.outputs[i].dims;
            require(shapes_out[i].nbDims == dims.nbDims, "rank of " + case_.outputs[i].name);
            for (int j = 0; j < dims.nbDims; ++j)
                require(shapes_out[i].d[j]->getConstantValue() == dims.d[j], "shape of " + case_.outputs[i].name);
            require(of.build->getAliasedInput(i) == case_.outputs[i].alias, "alias of " + case_.outputs[i].name);
        }

        for (int i = 0; i < inputs() + outputs(); ++i) {
            require(of.build->supportsFormatCombination(i, dynamic_.data(), inputs(), outputs()), "format");
            std::vector<abi::DynamicPluginTensorDesc> wrong = dynamic_;
            wrong[i].desc.type = abi::DataType::kUINT8;
            require(!of.build->supportsFormatCombination(i, wrong.data(), inputs(), outputs()), "uint8 is accepted");
            wrong = dynamic_;
            wrong[i].desc.format = abi::TensorFormat(1);
            require(!of.build->supportsFormatCombination(i, wrong.data(), inputs(), outputs()), "CHW2 is accepted");
        }
        require(!logger.remarks.empty(), "refused formats leave no remark");
        logger.remarks.clear();
    }

    void change_shapes(abi::IPluginV3OneRuntime* runtime) {
        const abi::PluginTensorDesc* out = descriptions_.data() + inputs();
        require(runtime->onShapeChange(descriptions_.data(), inputs(), out, outputs()) == 0, "onShapeChange");
        for (int i = 0; i < inputs(); ++i) {
            std::vector<abi::PluginTensorDesc> wrong(descriptions_.begin(), descriptions_.begin() + inputs());
            wrong[i].dims.nbDims += 1;
            wrong[i].dims.d[wrong[i].dims.nbDims - 1] = 1;
            require_refusal(runtime->onShapeChange(wrong.data(), inputs(), out, outputs()) != 0,
                            "one dimension too many in " + case_.inputs[i].name);
        }
        for (int i = 0; i < outputs(); ++i) {
            std::vector<abi::PluginTensorDesc> wrong(out, out + outputs());
            wrong[i].dims.d[0] += 1;
            require_refusal(runtime->onShapeChange(descriptions_.data(), inputs(), wrong.data(), outputs()) != 0,
                            "one row too many in " + case_.outputs[i].name);
        }
    }

    int32_t enqueue(abi::IPluginV3OneRuntime* runtime, const std::vector<void*>& in, const std::vector<void*>& out,
                    void* workspace, cudaStream_t stream) {
        const std::vector<const void*> sources(in.begin(), in.end());
        return runtime->enqueue(descriptions_.data(), descriptions_.data() + inputs(), sources.data(), out.data(),
                                workspace, stream);
    }

    void fail_without_gpu(abi::IPluginV3OneRuntime* runtime) {
        // Nothing is launched, so nothing reads these addresses.
        const std::vector<void*> in(inputs(), (void*)4096), out(outputs(), (void*)4096);
        require_refusal(enqueue(runtime, in, out, (void*)4096, nullptr) != 0, "enqueue without a GPU");
    }

    void run(const Capabilities& attached) {
        constexpr size_t kGuard = 4096;
        cudaStream_t stream;
        check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        std::vector<void*> in, out;
        for (const Tensor& tensor : case_.inputs) in.push_back(device_memory(tensor.bytes.size()));
        for (const Tensor& tensor : case_.outputs)
            out.push_back(tensor.alias >= 0 ? in[tensor.alias] : device_memory(bytes_in(tensor)));
        char* workspace = static_cast<char*>(device_memory(workspace_bytes_ + kGuard));
        const auto prepare = [&] {
            for (int i = 0; i < outputs(); ++i)
                check_cuda(cudaMemset(out[i], 0xff, bytes_in(case_.outputs[i])), "poison");
            check_cuda(cudaMemset(workspace, 0xff, workspace_bytes_ + kGuard), "poison");
            for (int i = 0; i < inputs(); ++i)
                check_cuda(cudaMemcpy(in[i], case_.inputs[i].bytes.data(), case_.inputs[i].bytes.size(),
                                      cudaMemcpyHostToDevice),
                           "input");
            // A copy from pageable memory may still be on its way when it returns, and `stream` waits for no other.
            check_cuda(cudaDeviceSynchronize(), "inputs");
        };
        const auto judge = [&](const std::string& how) {
            check_cuda(cudaStreamSynchronize(stream), how.c_str());
            for (int i = 0; i < outputs(); ++i) {
                std::vector<char> bytes(bytes_in(case_.outputs[i]));
                check_cuda(cudaMemcpy(bytes.data(), out[i], bytes.size(), cudaMemcpyDeviceToHost), "output");
                const std::string difference = compare(case_.outputs[i], bytes);
                require(difference.empty(), how + ": " + difference);
            }
            std::vector<unsigned char> guard(kGuard);
            check_cuda(cudaMemcpy(guard.data(), workspace + workspace_bytes_, kGuard, cudaMemcpyDeviceToHost), "guard");
            for (const unsigned char byte : guard) require(byte == 0xff, how + ": wrote beyond its workspace");
        };

        prepare();
        require(enqueue(attached.runtime, in, out, workspace, stream) == 0, "enqueue");
        judge("enqueue");

        prepare();
        Capabilities clone(attached.plugin->clone());
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
        require(enqueue(clone.runtime, in, out, workspace, stream) == 0, "enqueue of a clone under capture");
        check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
        check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
        check_cuda(cudaGraphLaunch(executable, stream), "graph launch");
        judge("clone in a CUDA graph");
        check_cuda(cudaGraphExecDestroy(executable), "destroy");
        check_cuda(cudaGraphDestroy(graph), "destroy");
        delete clone.plugin;

        refuse_or_copy_out_of_place(attached.runtime, in, out, workspace, stream, prepare, judge);
        for (void* memory : allocated_) check_cuda(cudaFree(memory), "free");
        check_cuda(cudaStreamDestroy(stream), "destroy");
    }

    // Without the aliasing preview feature TensorRT hands out separate memory. A cache must not be written there.
    void refuse_or_copy_out_of_place(abi::IPluginV3OneRuntime* runtime, std::vector<void*>& in, std::vector<void*>& out,
                                     void* workspace, cudaStream_t stream, const std::function<void()>& prepare,
                                     const std::function<void(const std::string&)>& judge) {
        for (int i = 0; i < outputs(); ++i) {
            if (case_.outputs[i].alias < 0) continue;
            void* const shared = out[i];
            out[i] = device_memory(bytes_in(case_.outputs[i]));
            prepare();
            const bool accepted = enqueue(runtime, in, out, workspace, stream) == 0;
            if (case_.outputs[i].name == "residual_out") {
                require(accepted, "a residual with its own memory");
                judge("a residual with its own memory");
            } else {
                require_refusal(!accepted, case_.outputs[i].name + " out of place");
            }
            out[i] = shared;
        }
    }

    static size_t bytes_in(const Tensor& tensor) { return size_t(tensor.count() * bytes_of(tensor.type)); }

    void* device_memory(size_t bytes) {
        void* memory = nullptr;
        check_cuda(cudaMalloc(&memory, bytes ? bytes : 1), "memory");
        allocated_.push_back(memory);
        return memory;
    }

    const Case& case_;
    abi::IPluginCreatorV3One* creator_;
    std::vector<abi::PluginTensorDesc> descriptions_;
    std::vector<abi::DynamicPluginTensorDesc> dynamic_;
    std::vector<void*> allocated_;
    size_t workspace_bytes_ = 0;
};

int main_of(int count, char** arguments) {
    if (count < 3) {
        std::fprintf(stderr, "usage: plugin_harness LIBRARY CASE_FOLDER...\n");
        return 2;
    }
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    auto get_creators = (abi::IPluginCreatorInterface* const* (*)(int32_t&))dlsym(library, "getCreators");
    auto set_logger_finder = (void (*)(abi::ILoggerFinder*))dlsym(library, "setLoggerFinder");
    if (!get_creators || !set_logger_finder) {
        std::fprintf(stderr, "%s exports no getCreators or setLoggerFinder\n", arguments[1]);
        return 2;
    }
    int devices = 0;
    has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    set_logger_finder(&logger);
    int32_t creator_count = 0;
    abi::IPluginCreatorInterface* const* creators = get_creators(creator_count);
    int failed = 0;
    for (int i = 2; i < count; ++i) {
        const char* verdict = "ok";
        std::string reason;
        try {
            const Case given = read_case(arguments[i]);
            Life(given, creator_of(creators, creator_count, given.plugin)).lead();
        } catch (const std::exception& error) {
            verdict = "FAILED", reason = std::string(": ") + error.what(), ++failed;
        }
        std::printf("%-8s %s%s\n", verdict, arguments[i], reason.c_str());
    }
    std::printf("%d of %d cases failed; %s\n", failed, count - 2,
                has_gpu ? "ran on the GPU" : "no GPU: nothing was launched");
    set_logger_finder(nullptr);
    return failed ? 1 : 0;
}

}  // namespace
}  // namespace harness

int main(int count, char** arguments) { return harness::main_of(count, arguments); }
