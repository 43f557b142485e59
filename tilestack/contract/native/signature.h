// What a choice of implementation may depend on of a call's tensors, as bytes: call.py's key, made in C++.
//
//     of each tensor: class, dtype, device, dimensions, sizes, strides · deterministic · gradient wanted
//
// Two calls have the same bytes if and only if Python would have made the same key of them. What is rare has none (None),
// and Python makes its key: autocast, transforms of torch.func, classes derived from Tensor, negated views, tensors
// without strides or whose sizes are symbols, and what is no tensor at all.

#pragma once

#include <Python.h>

#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

namespace tilestack {

using Bytes = c10::SmallVector<char, 512>;

enum class Given : char { none = 0, tensor = 1, parameter = 2, list = 3 };

inline PyObject* parameter_class = nullptr;  // torch.nn.Parameter

template <class Number>
void append(Bytes& bytes, Number number) {
  const char* first = reinterpret_cast<const char*>(&number);
  bytes.append(first, first + sizeof(Number));
}

inline bool is_ordinary_state() {
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  return local.excluded_.has_all(c10::autocast_dispatch_keyset) &&
      !local.included_.has_any(c10::DispatchKeySet(
          {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
}

// Appends what is known of an argument: a tensor, None, or several in a list. False where Python has to look at it.
inline bool append_argument(Bytes& bytes, PyObject* value, bool& wants_gradient, bool in_list = false) {
  if (value == Py_None && !in_list) {
    append(bytes, Given::none);
    return true;
  }
  if (!in_list && (PyList_CheckExact(value) || PyTuple_CheckExact(value))) {
    append(bytes, Given::list);
    append(bytes, static_cast<int64_t>(PySequence_Fast_GET_SIZE(value)));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!append_argument(bytes, PySequence_Fast_GET_ITEM(value, i), wants_gradient, true)) return false;
    }
    return true;
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type != THPVariableClass && type != parameter_class) return false;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  const auto* implementation = tensor.unsafeGetTensorImpl();
  if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_neg() ||
      implementation->has_symbolic_sizes_strides()) {
    return false;
  }
  wants_gradient = wants_gradient || tensor.requires_grad();
  append(bytes, type == parameter_class ? Given::parameter : Given::tensor);
  append(bytes, tensor.scalar_type());
  append(bytes, tensor.device().type());
  append(bytes, tensor.device().index());
  append(bytes, tensor.dim());
  for (int64_t size : tensor.sizes()) append(bytes, size);
  for (int64_t stride : tensor.strides()) append(bytes, stride);
  return true;
}

inline PyObject* signature(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!is_ordinary_state()) Py_RETURN_NONE;
  Bytes bytes;
  bool wants_gradient = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!append_argument(bytes, values[i], wants_gradient)) Py_RETURN_NONE;
  }
  append(bytes, static_cast<char>(at::globalContext().deterministicAlgorithms()));
  append(bytes, static_cast<char>(wants_gradient && at::GradMode::is_enabled()));
  return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  END_HANDLE_TH_ERRORS
}

}  // namespace tilestack
