// A call that wants a gradient, in C++: what autograd.py writes as a torch.autograd.Function, without its Python.
//
//     forward    Pair.__call__(*arguments) ─▶ pair.forward(*arguments), gradients off ─▶ results with a CallNode behind them
//     backward   CallNode::apply(grads)    ─▶ pair.backward(*what it names), which is grads, kept tensors and options
//
// A Wiring says which argument, result or extra is kept and what the backward names; it is made once for an
// implementation, from what the Python function is written from. A Pair belongs to a signature and is what a plan calls:
// its `forward` and `backward` are replaced by their repeated selves. A CallNode belongs to a call. Kept tensors are
// SavedVariables, so versions are checked, hooks may move them away, and autograd frees them.
//
// What is rare, a gradient that is to be differentiated again or one too few, is left to the Python functions that the
// other way uses as well.

#include <Python.h>
#include <structmember.h>

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "signature.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace torch::autograd;
using NodePtr = decltype(std::declval<Node&>().getptr());  // a shared_ptr in PyTorch 2.11, an intrusive_ptr in 2.13

constexpr size_t FEW = 8;  // arguments, kept tensors and the like that need no memory of their own
using Objects = c10::SmallVector<THPObjectPtr, FEW>;
using Borrowed = c10::SmallVector<PyObject*, FEW>;

// Where a value comes from: an argument of the call, one of its results or extras, an arriving gradient, a kept tensor,
// a kept option, or the list of which tensors want a gradient.
enum class Kind { argument, result, extra, grad, kept, option, needs };

struct Source {
  Kind kind;
  size_t place;
};

struct Wiring {
  PyObject_HEAD
  struct Parts {
    std::string name;
    size_t parameters = 0, results = 0, extras = 0;
    std::vector<size_t> tensors;      // places of the tensors among the parameters
    std::vector<size_t> options;      // places of the options that the backward names
    std::vector<Source> kept;         // arguments, results and extras
    std::vector<Source> named;        // what the backward is called with: grad, kept, option, needs
    std::vector<size_t> overwritten;  // places among the kept
    std::vector<size_t> grads_named;  // results whose gradients the backward names
    bool asks_needs = false;          // whether the forward names `needs` too
    PyObject* once = nullptr;         // found = once(backward, its arguments, tensors they came from, needs)
    PyObject* miscounted = nullptr;   // error = miscounted(found)
  }* parts;
};

struct Pair {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Wiring* wiring;
  PyObject* forward;
  PyObject* backward;
};

// The right to touch Python's objects, which autograd's own threads have to ask for.
struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  Gil() = default;
  Gil(const Gil&) = delete;
  ~Gil() {
    PyGILState_Release(state);
  }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  WithoutGil() = default;
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() {
    PyEval_RestoreThread(state);
  }
};

[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();  // it may be raised in another thread
  throw std::move(error);
}

THPObjectPtr checked(PyObject* made) {
  if (!made) throw_python_error();
  return THPObjectPtr(made);
}

template <class Owning, class Made>
Owning owning(Made* node) {
  if constexpr (std::is_same_v<Owning, std::shared_ptr<Node>>) {
    return Owning(node, [](auto* unused) { deleteNode(unused); });  // which is not recursive, however long the graph
  } else {
    return c10::intrusive_ptr<Made>::unsafe_steal_from_new(node);
  }
}

struct CallNode : Node {
  Pair* pair;
  Objects options;
  std::vector<SavedVariable> kept;
  std::vector<std::pair<size_t, VariableInfo>> without_gradient;  // results of another dtype that the backward asks about
  bool freed = false;

  explicit CallNode(Pair* owner, edge_list&& edges) : Node(std::move(edges)), pair(owner) {
    Py_INCREF(owner);
  }

  ~CallNode() override {
    if (!Py_IsInitialized()) {
      for (auto& option : options) option.release();  // nobody is left to free them
      return;
    }
    Gil gil;
    options.clear();
    Py_DECREF(pair);
  }

  const Wiring::Parts& wiring() const {
    return *pair->wiring->parts;
  }

  std::string name() const override {
    return wiring().name + "Backward";
  }

  void release_variables() override {
    if (!Py_IsInitialized()) return;
    Gil gil;  // as in `apply`, which may run in another thread
    kept.clear();
    freed = true;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd cannot look into ", name(), ", which is C++; set TILESTACK_NATIVE=0 to have it in Python");
  }

  variable_list apply(variable_list&& grads) override;

  Objects unpack_kept();
  THPObjectPtr gradient(const at::Tensor& arrived, size_t result);
  THPObjectPtr needs() const;
};

Objects CallNode::unpack_kept() {
  Objects unpacked;
  if (wiring().kept.empty()) return unpacked;
  TORCH_CHECK(!freed, ERR_BACKWARD_TWICE);
  for (auto& variable : kept) {
    at::Tensor tensor = variable.unpack(getptr());
    unpacked.emplace_back(checked(tensor.defined() ? THPVariable_Wrap(std::move(tensor)) : Py_NewRef(Py_None)));
  }
  if (!wiring().overwritten.empty() && get_current_graph_task_keep_graph()) {
    for (size_t place : wiring().overwritten) {
      if (unpacked[place].get() != Py_None) {
        unpacked[place] = checked(THPVariable_Wrap(THPVariable_Unpack(unpacked[place].get()).clone()));
      }
    }
  }
  return unpacked;
}

// What arrived for a result, or zeros in its shape where nothing did.
THPObjectPtr CallNode::gradient(const at::Tensor& arrived, size_t result) {
  if (arrived.defined()) return checked(THPVariable_Wrap(arrived));
  at::Tensor zeros;
  if (!input_metadata(result).was_default_constructed()) {
    WithoutGil others_may_run;  // an allocation may wait for the GPU
    zeros = input_metadata(result).zeros_like();
  }
  for (auto& [place, info] : without_gradient) {
    at::OptionalDeviceGuard guard;
    if (place == result) zeros = info.zeros(guard);
  }
  return checked(THPVariable_Wrap(std::move(zeros)));
}

THPObjectPtr CallNode::needs() const {
  THPObjectPtr list = checked(PyList_New(static_cast<Py_ssize_t>(num_outputs())));
  for (size_t i = 0; i < num_outputs(); ++i) {
    PyList_SET_ITEM(list.get(), i, PyBool_FromLong(next_edge(i).is_valid()));
  }
  return list;
}

THPObjectPtr tuple_of(const Borrowed& objects) {
  THPObjectPtr tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(objects.size())));
  for (size_t i = 0; i < objects.size(); ++i) PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(objects[i]));
  return tuple;
}

bool contains(const std::vector<size_t>& places, size_t place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

variable_list CallNode::apply(variable_list&& grads) {
  Gil gil;
  const auto& wired = wiring();
  TORCH_INTERNAL_ASSERT(grads.size() == wired.results, name(), " has results that its operator does not declare");
  Objects unpacked = unpack_kept();
  Objects arrived;
  arrived.resize(grads.size());
  for (size_t result : wired.grads_named) arrived[result] = gradient(grads[result], result);
  THPObjectPtr wanted;
  Borrowed values;
  for (auto& [kind, place] : wired.named) {
    switch (kind) {
      case Kind::grad: values.push_back(arrived[place].get()); break;
      case Kind::kept: values.push_back(unpacked[place].get()); break;
      case Kind::option: values.push_back(options[place].get()); break;
      default: wanted = needs(); values.push_back(wanted.get());
    }
  }
  THPObjectPtr backward(Py_NewRef(pair->backward));  // the call may replace it
  THPObjectPtr found;
  if (!GradMode::is_enabled()) {
    grads.clear();
    found = PyObject_Vectorcall(backward.get(), values.data(), values.size(), nullptr);
  } else {
    Borrowed sources;
    for (size_t result = 0; result < grads.size(); ++result) {
      if (!arrived[result].get()) arrived[result] = checked(THPVariable_Wrap(grads[result]));
      sources.push_back(arrived[result].get());
    }
    for (size_t place = 0; place < unpacked.size(); ++place) {
      if (!contains(wired.overwritten, place)) sources.push_back(unpacked[place].get());
    }
    THPObjectPtr arguments = tuple_of(values), made_from = tuple_of(sources), asked = needs();
    found = PyObject_CallFunctionObjArgs(
        wired.once, backward.get(), arguments.get(), made_from.get(), asked.get(), nullptr);
  }
  if (!found.get()) throw_python_error();

  const bool several = PyTuple_Check(found.get()) || PyList_Check(found.get());
  const size_t count = several ? PySequence_Fast_GET_SIZE(found.get()) : found.get() != Py_None;
  if (count != num_outputs()) {
    THPObjectPtr error = checked(PyObject_CallOneArg(wired.miscounted, found.get()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
    throw_python_error();
  }
  PyObject* alone = found.get();
  PyObject** gradients = several ? PySequence_Fast_ITEMS(found.get()) : &alone;
  variable_list results(count);
  for (size_t i = 0; i < count; ++i) {
    if (gradients[i] == Py_None || !next_edge(i).is_valid()) continue;
    TORCH_CHECK(THPVariable_Check(gradients[i]), "expected Variable or None (got ", Py_TYPE(gradients[i])->tp_name, ")");
    results[i] = THPVariable_Unpack(gradients[i]);
  }
  return results;
}

bool is_tensor(PyObject* value) {
  return value != Py_None && THPVariable_Check(value);
}

// The results of a call as an array: of one, the object itself.
struct Results {
  PyObject* alone;
  PyObject** each;
  size_t count;

  Results(PyObject* out, size_t declared) : alone(out), each(&alone), count(1) {
    if (declared != 1 && (PyTuple_Check(out) || PyList_Check(out))) {
      each = PySequence_Fast_ITEMS(out);
      count = PySequence_Fast_GET_SIZE(out);
    }
  }
  Results(const Results&) = delete;
};

// Puts the node behind results that are new memory, as most are; for others PyTorch makes what is to be returned.
THPObjectPtr link(
    PyObject* out, const Results& results, PyObject* const* values, const Wiring::Parts& wired, const NodePtr& node) {
  bool fresh = true;
  for (size_t i = 0; i < results.count; ++i) {
    if (!is_tensor(results.each[i])) continue;
    const auto& result = THPVariable_Unpack(results.each[i]);
    fresh = fresh && !result.is_view() && !result.requires_grad();
    for (size_t place : wired.tensors) fresh = fresh && results.each[i] != values[place];
  }
  if (fresh) {
    for (size_t i = 0; node && i < results.count; ++i) {
      if (is_tensor(results.each[i]) && isDifferentiableType(THPVariable_Unpack(results.each[i]).scalar_type())) {
        const auto& result = THPVariable_Unpack(results.each[i]);
        impl::set_gradient_edge(result, {node, node->add_input_metadata(result)});
      } else {
        node->add_input_metadata(Node::undefined_input());
      }
    }
    return THPObjectPtr(Py_NewRef(out));
  }
  variable_list given;
  for (size_t place : wired.tensors) {
    if (is_tensor(values[place])) given.push_back(THPVariable_Unpack(values[place]));
  }
  std::vector<std::optional<at::Tensor>> raw(results.count);
  for (size_t i = 0; i < results.count; ++i) {
    if (is_tensor(results.each[i])) raw[i] = THPVariable_Unpack(results.each[i]);
  }
  auto no_tangents = [](const variable_list&, const variable_list&) -> variable_list { return {}; };
  auto itself = [](const at::Tensor& x) { return x.view_as(x); };
  auto wrapped = _wrap_outputs(given, {}, {}, raw, node, no_tangents, {}, itself, false);
  Objects made;
  Borrowed all;
  for (size_t i = 0; i < results.count; ++i) {
    made.push_back(checked(wrapped[i] ? THPVariable_Wrap(*wrapped[i]) : Py_NewRef(results.each[i])));
    all.push_back(made.back().get());
  }
  return results.each == &results.alone ? std::move(made[0]) : tuple_of(all);
}

// What the forward answers, which gets `needs` where it asks for it; nothing where it raised an error.
THPObjectPtr call_forward(const Pair* pair, PyObject* const* values, size_t count, const CallNode* call) {
  THPObjectPtr forward(Py_NewRef(pair->forward));  // the call may replace it
  AutoGradMode without_gradients(false);
  if (!pair->wiring->parts->asks_needs) {
    return THPObjectPtr(PyObject_Vectorcall(forward.get(), values, count, nullptr));
  }
  static PyObject* const names = Py_BuildValue("(s)", "needs");
  const size_t tensors = pair->wiring->parts->tensors.size();
  THPObjectPtr needs = checked(PyList_New(static_cast<Py_ssize_t>(tensors)));
  for (size_t i = 0; i < tensors; ++i) {
    PyList_SET_ITEM(needs.get(), i, PyBool_FromLong(call && call->next_edge(i).is_valid()));
  }
  Borrowed all(values, values + count);
  all.push_back(needs.get());
  return THPObjectPtr(PyObject_Vectorcall(forward.get(), all.data(), count, names));
}

void keep(CallNode& call, PyObject* const* values, const Results& results, PyObject* const* extras, const NodePtr& node) {
  const auto& wired = call.wiring();
  call.kept.reserve(wired.kept.size());
  for (auto& [kind, place] : wired.kept) {
    PyObject* value = kind == Kind::argument ? values[place]
        : kind == Kind::extra                ? extras[place]
        : place < results.count              ? results.each[place]
                                             : Py_None;
    if (value == Py_None) {
      call.kept.emplace_back();
      continue;
    }
    TORCH_CHECK_TYPE(
        THPVariable_Check(value), "save_for_backward can only save variables, but argument ", call.kept.size(),
        " is of type ", Py_TYPE(value)->tp_name);
    const auto& tensor = THPVariable_Unpack(value);
    call.kept.emplace_back(tensor, kind != Kind::argument && tensor.grad_fn() == node);
  }
  for (size_t place : wired.options) call.options.emplace_back(Py_NewRef(values[place]));
  for (size_t place : wired.grads_named) {
    if (place < results.count && call.input_metadata(place).was_default_constructed() && is_tensor(results.each[place])) {
      call.without_gradient.emplace_back(place, VariableInfo(THPVariable_Unpack(results.each[place])));
    }
  }
}

// Tells a profiler of the call until the record goes, if one listens.
void begin(
    std::optional<at::RecordFunction>& record, const Wiring::Parts& wired, PyObject* const* values, const NodePtr& node) {
  auto listeners = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (C10_LIKELY(!listeners)) return;
  record.emplace(std::move(*listeners));
  std::vector<c10::IValue> inputs;
  for (size_t place : wired.tensors) {
    if (record->needsInputs() && is_tensor(values[place])) inputs.emplace_back(THPVariable_Unpack(values[place]));
  }
  const c10::ArrayRef<const c10::IValue> listed(inputs.data(), inputs.size());
  record->before(wired.name, listed, node ? static_cast<int64_t>(node->sequence_nr()) : -1);
}

PyObject* pair_call(PyObject* self, PyObject* const* values, size_t flags, PyObject* keywords) {
  HANDLE_TH_ERRORS
  auto* pair = reinterpret_cast<Pair*>(self);
  const auto& wired = *pair->wiring->parts;
  const size_t count = PyVectorcall_NARGS(flags);
  TORCH_CHECK_TYPE(
      count == wired.parameters && !(keywords && PyTuple_GET_SIZE(keywords)), wired.name, " takes ", wired.parameters,
      " arguments by position");

  NodePtr node;
  CallNode* call = nullptr;
  if (GradMode::is_enabled()) {
    edge_list edges;
    edges.reserve(wired.tensors.size());
    bool any = false;
    for (size_t place : wired.tensors) {
      edges.push_back(is_tensor(values[place]) ? impl::gradient_edge(THPVariable_Unpack(values[place])) : Edge());
      any = any || edges.back().is_valid();
    }
    if (any) {
      call = new CallNode(pair, std::move(edges));
      node = owning<NodePtr>(call);
    }
  }
  std::optional<at::RecordFunction> record;
  begin(record, wired, values, node);
  THPObjectPtr returned = call_forward(pair, values, count, call);
  if (!returned.get()) return nullptr;

  PyObject* out = returned.get();
  PyObject** extras = nullptr;
  if (wired.extras) {
    const bool several = PyTuple_Check(out) || PyList_Check(out);
    const size_t found = several ? PySequence_Fast_GET_SIZE(out) : 1;
    TORCH_CHECK_VALUE(
        found == 1 + wired.extras, wired.name, " returned ", found, " values, but its backward names ", wired.extras,
        " extras behind the result");
    extras = PySequence_Fast_ITEMS(out) + 1;
    out = extras[-1];
  }
  const Results results(out, wired.results);
  THPObjectPtr linked = link(out, results, values, wired, node);
  if (call) keep(*call, values, results, extras, node);
  return linked.release();
  END_HANDLE_TH_ERRORS
}

// Reading what Python says of an implementation.

std::vector<size_t> places_of(PyObject* numbers) {
  std::vector<size_t> places;
  THPObjectPtr list = checked(PySequence_Fast(numbers, "places are a sequence"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.get()); ++i) {
    places.push_back(PyLong_AsSize_t(PySequence_Fast_GET_ITEM(list.get(), i)));
    if (PyErr_Occurred()) throw_python_error();
  }
  return places;
}

Kind kind_of(const std::string& word) {
  static const std::vector<std::string> words = {"argument", "result", "extra", "grad", "kept", "option", "needs"};
  const auto found = std::find(words.begin(), words.end(), word);
  TORCH_CHECK_VALUE(found != words.end(), "nothing comes from a ", word);
  return static_cast<Kind>(found - words.begin());
}

std::vector<Source> sources_of(PyObject* pairs) {
  std::vector<Source> sources;
  THPObjectPtr list = checked(PySequence_Fast(pairs, "sources are a sequence"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.get()); ++i) {
    const char* word = nullptr;
    Py_ssize_t place = 0;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(list.get(), i), "sn", &word, &place)) throw_python_error();
    sources.push_back({kind_of(word), static_cast<size_t>(place)});
  }
  return sources;
}

PyObject* wiring_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"name",  "parameters",  "results",    "extras", "tensors",    "options", "kept",
                                "named", "overwritten", "asks_needs", "once",   "miscounted", nullptr};
  const char* name = nullptr;
  Py_ssize_t parameters = 0, results = 0, extras = 0;
  PyObject *tensors, *options, *kept, *named, *overwritten, *once, *miscounted;
  int asks_needs = 0;
  if (!PyArg_ParseTupleAndKeywords(
          arguments, keywords, "snnnOOOOOpOO", const_cast<char**>(names), &name, &parameters, &results, &extras, &tensors,
          &options, &kept, &named, &overwritten, &asks_needs, &once, &miscounted)) {
    return nullptr;
  }
  auto parts = std::make_unique<Wiring::Parts>();
  parts->name = name;
  parts->parameters = parameters;
  parts->results = results;
  parts->extras = extras;
  parts->tensors = places_of(tensors);
  parts->options = places_of(options);
  parts->kept = sources_of(kept);
  parts->named = sources_of(named);
  parts->overwritten = places_of(overwritten);
  for (auto& [kind, place] : parts->named) {
    if (kind == Kind::grad) parts->grads_named.push_back(place);
  }
  parts->asks_needs = asks_needs;
  THPObjectPtr self = checked(type->tp_alloc(type, 0));
  parts->once = Py_NewRef(once);
  parts->miscounted = Py_NewRef(miscounted);
  reinterpret_cast<Wiring*>(self.get())->parts = parts.release();
  return self.release();
  END_HANDLE_TH_ERRORS
}

int wiring_traverse(PyObject* self, visitproc visit, void* arg) {
  if (auto* parts = reinterpret_cast<Wiring*>(self)->parts) {
    Py_VISIT(parts->once);
    Py_VISIT(parts->miscounted);
  }
  return 0;
}

int wiring_clear(PyObject* self) {
  if (auto* parts = reinterpret_cast<Wiring*>(self)->parts) {
    Py_CLEAR(parts->once);
    Py_CLEAR(parts->miscounted);
  }
  return 0;
}

void wiring_free(PyObject* self) {
  PyObject_GC_UnTrack(self);
  wiring_clear(self);
  delete reinterpret_cast<Wiring*>(self)->parts;
  Py_TYPE(self)->tp_free(self);
}

extern PyTypeObject WiringType, PairType;

PyObject* pair_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"wiring", nullptr};
  PyObject* wiring = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!", const_cast<char**>(names), &WiringType, &wiring)) {
    return nullptr;
  }
  auto* pair = reinterpret_cast<Pair*>(type->tp_alloc(type, 0));
  if (!pair) return nullptr;
  pair->vectorcall = pair_call;
  pair->wiring = reinterpret_cast<Wiring*>(Py_NewRef(wiring));
  pair->forward = Py_NewRef(Py_None);
  pair->backward = Py_NewRef(Py_None);
  return reinterpret_cast<PyObject*>(pair);
}

int pair_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* pair = reinterpret_cast<Pair*>(self);
  Py_VISIT(pair->wiring);
  Py_VISIT(pair->forward);
  Py_VISIT(pair->backward);
  return 0;
}

int pair_clear(PyObject* self) {
  auto* pair = reinterpret_cast<Pair*>(self);
  Py_CLEAR(pair->forward);
  Py_CLEAR(pair->backward);
  return 0;
}

void pair_free(PyObject* self) {
  PyObject_GC_UnTrack(self);
  pair_clear(self);
  Py_CLEAR(reinterpret_cast<Pair*>(self)->wiring);
  Py_TYPE(self)->tp_free(self);
}

PyMemberDef pair_members[] = {
    {"forward", T_OBJECT, offsetof(Pair, forward), 0, "what makes the results, and the extras"},
    {"backward", T_OBJECT, offsetof(Pair, backward), 0, "what makes the gradients of the tensors"},
    {nullptr}};

PyTypeObject WiringType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "tilestack_node.Wiring";
  type.tp_doc = "What the gradients of one implementation keep and get, by places.";
  type.tp_basicsize = sizeof(Wiring);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_new = wiring_new;
  type.tp_dealloc = wiring_free;
  type.tp_traverse = wiring_traverse;
  type.tp_clear = wiring_clear;
  return type;
}();

PyTypeObject PairType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "tilestack_node.Pair";
  type.tp_doc = "The forward and backward of one signature; called, it runs the forward and remembers the backward.";
  type.tp_basicsize = sizeof(Pair);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(Pair, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = pair_new;
  type.tp_dealloc = pair_free;
  type.tp_traverse = pair_traverse;
  type.tp_clear = pair_clear;
  type.tp_members = pair_members;
  return type;
}();

// The class of `grad_fn`, filled by PyTorch, which prints those of just this name by what `name` tells.
PyTypeObject CppFunctionType = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyMethodDef functions[] = {
    {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(tilestack::signature)), METH_FASTCALL,
     "What a choice may depend on of some tensors, as bytes; None where that is rare."},
    {nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilestack_node", "An operator's calls, in C++.", -1, functions};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_tilestack_node() {
  HANDLE_TH_ERRORS
  _initFunctionPyTypeObject(CppFunctionType, "tilestack_node.CppFunction", nullptr, nullptr);
  registerCppFunction(typeid(CallNode), &CppFunctionType);
  THPObjectPtr parameters = checked(PyImport_ImportModule("torch.nn.parameter"));
  tilestack::parameter_class = checked(PyObject_GetAttrString(parameters.get(), "Parameter")).release();
  THPObjectPtr made = checked(PyModule_Create(&module));
  for (PyTypeObject* type : {&WiringType, &PairType, &CppFunctionType}) {
    if (PyModule_AddType(made.get(), type) < 0) return nullptr;
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}
