// Calls of an operator with their place in autograd's graph, for launch/native.py: allocate, launch, remember, and the
// same backwards, without a frame of Python. What is allocated and launched was recorded by replay.py and arrives as
// tuples; whatever differs from what was recorded (a gradient of another layout, one that is recorded itself, torch
// functions that look on) is handed to the Python function that computes it in any case.

#include <Python.h>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <memory>
#include <mutex>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge().function);  // shared up to torch 2.12, then intrusive

// ---- what is recorded --------------------------------------------------------------------------------------------

struct Allocation {
  std::vector<int64_t> shape;
  at::TensorOptions options;
};

struct KernelArgument {
  int slot;  // of the tensor whose address this is; -1 for a number
  int64_t value;  // bytes behind that address, or the number's bits
};

struct Launch {
  void* function;
  unsigned grid[3], threads, shared_bytes;
  bool early, cooperative;
  std::vector<KernelArgument> arguments;
};

struct Result {
  int slot;  // -1: none
  bool is_whole;
  std::vector<int64_t> shape, strides;
  int64_t offset_bytes;
};

struct Program {
  std::vector<Allocation> allocations;
  std::vector<Launch> launches;
  std::vector<Result> results;
  std::vector<int> changed;
  PyObject* python = nullptr;  // launches instead, given all slots

  ~Program() {
    if (python != nullptr && Py_IsInitialized()) {
      pybind11::gil_scoped_acquire holds;
      Py_DECREF(python);
    }
  }
};

// What of a tensor decides how a call on it runs.
struct Signature {
  bool is_there;
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype;
  c10::Device device;
  int64_t alignment;

  static Signature of(const Tensor& tensor) {
    if (!tensor.defined()) return {false, {}, {}, at::ScalarType::Undefined, c10::kCPU, 0};
    return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.device(),
            reinterpret_cast<int64_t>(tensor.const_data_ptr()) & 15};
  }

  bool fits(const Tensor& tensor) const {
    if (!tensor.defined() || !is_there) return tensor.defined() == is_there;
    return tensor.sizes() == shape && tensor.strides() == strides && tensor.scalar_type() == dtype &&
        tensor.device() == device && (reinterpret_cast<int64_t>(tensor.const_data_ptr()) & 15) == alignment;
  }
};

struct Backward {
  std::vector<Signature> given;
  Program program;
};

// All that calls of one signature share.
struct Call {
  std::string name;
  PyObject* fallback = nullptr;
  int results = 1;
  std::vector<Tensor> stand_ins;  // saved in the place of an argument
  std::vector<int> kept;          // of what the program returns
  Program forward;
  std::mutex adding;
  std::vector<std::shared_ptr<Backward>> backward;

  ~Call() {
    if (fallback != nullptr && Py_IsInitialized()) {
      pybind11::gil_scoped_acquire holds;
      Py_DECREF(fallback);
    }
  }
};

using SharedCall = std::shared_ptr<Call>;

// ---- launching ---------------------------------------------------------------------------------------------------

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char unused[4];
  union {
    char whole[64];
    int flag;
  } value;
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

constexpr int kEarly = 6, kCooperative = 2;
int (*driver_launch)(const LaunchConfig*, void*, void**, void**) = nullptr;  // cuLaunchKernelEx
c10::Stream (*current_stream)(int8_t) = nullptr;
void* (*stream_handle)(const c10::Stream*) = nullptr;

void* find(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY);
  void* function = handle == nullptr ? nullptr : dlsym(handle, name);
  TORCH_CHECK(function != nullptr, "tilemesh: ", library, " has no ", name);
  return function;
}

void* stream_of(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  if (current_stream == nullptr) {
    *reinterpret_cast<void**>(&stream_handle) = find("libc10_cuda.so", "_ZNK3c104cuda10CUDAStream6streamEv");
    *reinterpret_cast<void**>(&current_stream) = find("libc10_cuda.so", "_ZN3c104cuda20getCurrentCUDAStreamEa");
  }
  c10::Stream stream = current_stream(device.index());
  return stream_handle(&stream);
}

void launch(const Launch& kernel, const std::vector<Tensor>& slots, void* stream) {
  if (driver_launch == nullptr) *reinterpret_cast<void**>(&driver_launch) = find("libcuda.so.1", "cuLaunchKernelEx");
  const size_t count = kernel.arguments.size();
  std::vector<int64_t> values(count);
  std::vector<void*> parameters(count);
  for (size_t at = 0; at < count; at++) {
    const auto& argument = kernel.arguments[at];
    values[at] = argument.value;
    if (argument.slot >= 0) values[at] += reinterpret_cast<int64_t>(slots[argument.slot].const_data_ptr());
    parameters[at] = &values[at];
  }
  LaunchAttribute attributes[2];
  LaunchConfig config{{kernel.grid[0], kernel.grid[1], kernel.grid[2]}, {kernel.threads, 1, 1}, kernel.shared_bytes,
                      stream, attributes, 0};
  for (auto [id, wanted] : {std::pair{kEarly, kernel.early}, std::pair{kCooperative, kernel.cooperative}}) {
    if (!wanted) continue;
    attributes[config.count].id = id;
    attributes[config.count++].value.flag = 1;
  }
  const int status = driver_launch(&config, kernel.function, parameters.data(), nullptr);
  TORCH_CHECK(status == 0, "tilemesh: a kernel could not be launched, CUDA error ", status);
}

pybind11::list wrapped(const std::vector<Tensor>& tensors) {
  pybind11::list made;
  for (const auto& tensor : tensors) made.append(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor)));
  return made;
}

// `slots` are the tensors of the call; what is allocated is added to them.
std::vector<Tensor> run(const Program& program, std::vector<Tensor>& slots) {
  at::AutoDispatchBelowADInplaceOrView no_history;
  c10::OptionalDeviceGuard on_device;
  for (const auto& allocation : program.allocations) slots.push_back(at::empty(allocation.shape, allocation.options));
  if (program.python != nullptr) {
    pybind11::gil_scoped_acquire holds;
    pybind11::handle(program.python)(wrapped(slots));
  } else if (!program.launches.empty()) {
    const auto device = program.allocations.empty() ? slots[0].device() : program.allocations[0].options.device();
    if (device.is_cuda()) on_device.reset_device(device);
    void* stream = stream_of(device);
    for (const auto& kernel : program.launches) launch(kernel, slots, stream);
  }
  for (int at : program.changed) slots[at].unsafeGetTensorImpl()->bump_version();
  std::vector<Tensor> made;
  made.reserve(program.results.size());
  for (const auto& result : program.results) {
    if (result.slot < 0) {
      made.emplace_back();
    } else if (result.is_whole) {
      made.push_back(slots[result.slot]);
    } else {
      const auto& slot = slots[result.slot];
      const auto begin = slot.storage_offset() + result.offset_bytes / static_cast<int64_t>(slot.element_size());
      made.push_back(slot.as_strided(result.shape, result.strides, begin));
    }
  }
  return made;
}

// ---- autograd's node ---------------------------------------------------------------------------------------------

// Whether something looks on that must see torch's own operators, or a tensor is none that kernels can read.
bool is_special(const std::vector<Tensor>& tensors) {
  if (c10::impl::dispatch_mode_enabled() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return true;
  }
  for (const auto& tensor : tensors) {
    if (tensor.defined() &&
        (tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_neg() || tensor.layout() != at::kStrided ||
         tensor.is_meta() || torch::autograd::isFwGradDefined(tensor))) {
      return true;
    }
  }
  return false;
}

template <typename Pointer, typename Own>
Pointer pointer_to(Own* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return node->shared_from_this();
  } else {
    return Pointer::reclaim_copy(node);
  }
}

struct CallNode : public Node {
  SharedCall call;
  std::vector<SavedVariable> saved;

  std::string name() const override { return call->name; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list made(num_outputs());
    bool has_gradient = false;
    for (const auto& gradient : gradients) has_gradient |= gradient.defined();
    if (!has_gradient) return made;
    std::vector<Tensor> slots(gradients.begin(), gradients.end());
    const NodePointer self = pointer_to<NodePointer>(this);
    for (auto& variable : saved) slots.push_back(variable.unpack(self));
    if (!at::GradMode::is_enabled() && !is_special(slots)) {
      if (auto known = recorded(slots)) {
        auto answer = run(known->program, slots);
        std::move(answer.begin(), answer.end(), made.begin());
        return made;
      }
    }
    return by_python(slots, gradients.size());
  }

 private:
  std::shared_ptr<Backward> recorded(const std::vector<Tensor>& slots) {
    std::lock_guard<std::mutex> lock(call->adding);
    for (const auto& backward : call->backward) {
      bool fits = backward->given.size() == slots.size();
      for (size_t at = 0; fits && at < slots.size(); at++) fits = backward->given[at].fits(slots[at]);
      if (fits) return backward;
    }
    return nullptr;
  }

  variable_list by_python(const std::vector<Tensor>& slots, size_t results);
};

PyObject* capsule_of(const SharedCall& call) {
  return PyCapsule_New(new SharedCall(call), "tilemesh.Call", [](PyObject* capsule) {
    delete static_cast<SharedCall*>(PyCapsule_GetPointer(capsule, "tilemesh.Call"));
  });
}

SharedCall call_of(PyObject* capsule) {
  auto* call = static_cast<SharedCall*>(PyCapsule_GetPointer(capsule, "tilemesh.Call"));
  if (call == nullptr) throw python_error();
  return *call;
}

variable_list CallNode::by_python(const std::vector<Tensor>& slots, size_t results) {
  pybind11::gil_scoped_acquire holds;
  auto capsule = pybind11::reinterpret_steal<pybind11::object>(capsule_of(call));
  pybind11::sequence answer = pybind11::handle(call->fallback)(capsule, wrapped(slots), results);
  variable_list made(num_outputs());
  for (size_t at = 0; at < answer.size() && at < made.size(); at++) {
    pybind11::object item = answer[at];
    if (!item.is_none()) made[at] = THPVariable_Unpack(item.ptr());
  }
  return made;
}

template <typename Pointer, typename Own>
Pointer new_node(const SharedCall& call) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    auto* node = new Own();
    node->call = call;
    return Pointer(node, [](auto* each) { deleteNode(each); });
  } else {
    auto node = c10::make_intrusive<Own>();
    node->call = call;
    return node;
  }
}

// ---- from Python -------------------------------------------------------------------------------------------------

std::vector<int64_t> numbers_of(pybind11::handle tuple) {
  std::vector<int64_t> made;
  for (auto item : tuple) made.push_back(item.cast<int64_t>());
  return made;
}

void read(Program& program, pybind11::handle text) {
  auto [allocations, launches, results, changed, python] =
      text.cast<std::tuple<pybind11::tuple, pybind11::tuple, pybind11::tuple, pybind11::tuple, pybind11::object>>();
  for (auto item : allocations) {
    auto pair = item.cast<pybind11::tuple>();
    program.allocations.push_back({numbers_of(pair[0]), THPVariable_Unpack(pair[1].ptr()).options()});
  }
  for (auto item : launches) {
    auto parts = item.cast<pybind11::tuple>();
    auto grid = numbers_of(parts[1]);
    Launch kernel{reinterpret_cast<void*>(parts[0].cast<uint64_t>()),
                  {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])},
                  parts[2].cast<unsigned>(), parts[3].cast<unsigned>(), parts[4].cast<bool>(), parts[5].cast<bool>(), {}};
    for (auto each : parts[6]) {
      auto pair = numbers_of(each);
      kernel.arguments.push_back({int(pair[0]), pair[1]});
    }
    program.launches.push_back(std::move(kernel));
  }
  for (auto item : results) {
    if (item.is_none()) {
      program.results.push_back({-1, false, {}, {}, 0});
    } else if (pybind11::isinstance<pybind11::int_>(item)) {
      program.results.push_back({item.cast<int>(), true, {}, {}, 0});
    } else {
      auto parts = item.cast<pybind11::tuple>();
      program.results.push_back(
          {parts[0].cast<int>(), false, numbers_of(parts[1]), numbers_of(parts[2]), parts[3].cast<int64_t>()});
    }
  }
  for (auto item : changed) program.changed.push_back(item.cast<int>());
  if (!python.is_none()) program.python = python.release().ptr();
}

Tensor tensor_or_none(PyObject* value) { return value == Py_None ? Tensor() : THPVariable_Unpack(value); }

// new_call(name, fallback, results, stand_ins, kept, program): stand_ins has None where the argument is saved.
PyObject* new_call(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto call = std::make_shared<Call>();
  call->name = pybind11::handle(given[0]).cast<std::string>();
  call->fallback = Py_NewRef(given[1]);
  call->results = int(PyLong_AsLong(given[2]));
  for (auto item : pybind11::handle(given[3])) call->stand_ins.push_back(tensor_or_none(item.ptr()));
  for (auto item : numbers_of(given[4])) call->kept.push_back(int(item));
  read(call->forward, given[5]);
  return capsule_of(call);
  END_HANDLE_TH_ERRORS
}

// add_backward(call, tensors, program): what is done for gradients and saved tensors that lie as these do.
PyObject* add_backward(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto call = call_of(given[0]);
  auto backward = std::make_shared<Backward>();
  for (auto item : pybind11::handle(given[1])) backward->given.push_back(Signature::of(tensor_or_none(item.ptr())));
  read(backward->program, given[2]);
  {
    pybind11::gil_scoped_release others;
    std::lock_guard<std::mutex> lock(call->adding);
    call->backward.push_back(backward);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// call(call, *tensors): the results, as torch's own operators return them.
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto call = call_of(given[0]);
  std::vector<Tensor> slots;
  slots.reserve(count - 1 + call->forward.allocations.size());
  edge_list edges;
  for (Py_ssize_t at = 1; at < count; at++) {
    slots.push_back(tensor_or_none(given[at]));
    const auto& tensor = slots.back();
    edges.push_back(tensor.defined() ? torch::autograd::impl::gradient_edge(tensor) : torch::autograd::Edge());
  }
  auto made = run(call->forward, slots);
  auto node = new_node<NodePointer, CallNode>(call);
  auto* own = static_cast<CallNode*>(node.get());
  own->set_next_edges(std::move(edges));
  for (int at = 0; at < call->results; at++) {
    if (made[at].defined() && torch::autograd::isDifferentiableType(made[at].scalar_type())) {
      torch::autograd::set_history(made[at], node);
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
  own->saved.reserve(count - 1 + call->kept.size());
  for (Py_ssize_t at = 0; at < count - 1; at++) {
    const auto& stand_in = call->stand_ins[at];
    own->saved.emplace_back(stand_in.defined() ? stand_in : slots[at], false);
  }
  for (int at : call->kept) own->saved.emplace_back(made[at], at < call->results);
  if (call->results == 1) return THPVariable_Wrap(made[0]);
  PyObject* tuple = PyTuple_New(call->results);
  for (int at = 0; at < call->results; at++) PyTuple_SET_ITEM(tuple, at, THPVariable_Wrap(made[at]));
  return tuple;
  END_HANDLE_TH_ERRORS
}

// set_driver(address): a function that launches in place of the driver's, for tests.
PyObject* set_driver(PyObject*, PyObject* address) {
  driver_launch = reinterpret_cast<decltype(driver_launch)>(PyLong_AsVoidPtr(address));
  Py_RETURN_NONE;
}

template <typename Function>
PyMethodDef fast(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    fast("new_call", new_call), fast("add_backward", add_backward), fast("call", call),
    {"set_driver", set_driver, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilemesh_node", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tilemesh_node() { return PyModule_Create(&module); }
