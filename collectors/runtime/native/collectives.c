/*
 * Hooks of collectives on the host, as PlainHooks in plain_hooks.py, which describes them and is used on a GPU, or where
 * this file was not compiled: a training thread that wakes from a wait finds little of Python in its caches.
 */
#include "native.h"
#include <string.h>

/* As Category, Flag and NONE in wire_format.py. */
#define NONE (-1)
enum { COLLECTIVE_OP = 3, WAIT_OP = 10, BLOCKING = 16 };

static PyTypeObject *RING, *STATE, *HOOK, *UNDER_WAY;
/* Names of attributes, made once: PyObject_GetAttrString would make one in each call. */
static PyObject *ASYNC_OP, *NBYTES, *ELEM, *DATA_PTR, *GET_FUTURE, *ADD_DONE_CALLBACK, *GROUP;

/* ---- the state of a session that hooks share ------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *held, *step;
    char optimizing, step_over;
    int busy, callbacks;
    unsigned long thread_id;
} State;

static int state_traverse(State *state, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(state));
    Py_VISIT(state->held);
    Py_VISIT(state->step);
    return 0;
}

static int state_clear(State *state)
{
    Py_CLEAR(state->held);
    Py_CLEAR(state->step);
    return 0;
}

static void state_free(State *state)
{
    PyTypeObject *type = Py_TYPE(state);
    PyObject_GC_UnTrack(state);
    state_clear(state);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(state);
    Py_DECREF(type);
}

static PyMemberDef STATE_MEMBERS[] = {
    {"held", T_OBJECT, offsetof(State, held), 0, NULL},
    {"step", T_OBJECT, offsetof(State, step), 0, NULL},
    {"optimizing", T_BOOL, offsetof(State, optimizing), 0, NULL},
    {"step_over", T_BOOL, offsetof(State, step_over), 0, NULL},
    {"busy", T_INT, offsetof(State, busy), 0, NULL},
    {"callbacks", T_INT, offsetof(State, callbacks), READONLY, NULL},
    {"thread_id", T_ULONG, offsetof(State, thread_id), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot STATE_SLOTS[] = {
    {Py_tp_doc, "See PlainState."}, {Py_tp_dealloc, state_free},     {Py_tp_traverse, state_traverse},
    {Py_tp_clear, state_clear},     {Py_tp_members, STATE_MEMBERS}, {0, NULL},
};
static PyType_Spec STATE_SPEC = {"tracekit.collectors.runtime._native.State", sizeof(State), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, STATE_SLOTS};

/* ---- an op under way: called with its future, or kept by its waiter, when it ends ------------------------------- */

typedef struct {
    PyObject_HEAD
    Fields fields;
    Ring *ring;
    PyObject *owner; /* what is waited for, or a work that this op's thread shall free */
    State *state;    /* that counts this op among its callbacks */
} UnderWay;

static UnderWay *under_way(Ring *ring, const Fields fields)
{
    UnderWay *op = (UnderWay *)((allocfunc)PyType_GetSlot(UNDER_WAY, Py_tp_alloc))(UNDER_WAY, 0);
    if (op == NULL) return NULL;
    memcpy(op->fields, fields, sizeof op->fields);
    Py_INCREF(ring);
    op->ring = ring;
    return op;
}

static void under_way_free(UnderWay *op)
{
    PyTypeObject *type = Py_TYPE(op);
    Py_XDECREF(op->owner);
    if (op->state != NULL) op->state->callbacks--;
    Py_XDECREF(op->state);
    Py_DECREF(op->ring);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

static void ends_now(UnderWay *op)
{
    set_field(op->fields, END, monotonic_ns());
    ring_keep(op->ring, op->fields);
}

static PyObject *under_way_call(UnderWay *op, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    ends_now(op);
    Py_RETURN_NONE;
}

static PyType_Slot UNDER_WAY_SLOTS[] = {{Py_tp_dealloc, under_way_free}, {Py_tp_call, under_way_call}, {0, NULL}};
static PyType_Spec UNDER_WAY_SPEC = {"tracekit.collectors.runtime._native.UnderWay", sizeof(UnderWay), 0,
                                     Py_TPFLAGS_DEFAULT, UNDER_WAY_SLOTS};

/* ---- all hooks of a session ------------------------------------------------------------------------------------- */

/* A process group, and its latest works: gloo's threads are never the last owners of those; see callbacks.py. */
typedef struct {
    PyObject *group; /* its address only */
    PyObject *reference;
    PyObject *latest[2]; /* GLOO_THREADS of callbacks.py */
    long long number;
} Group;

typedef struct {
    PyObject_HEAD
    State *state;
    Ring *ring;
    PyObject *collectives, *tensor, *off, *waited_for, *inside, *numbers;
    Group *groups;
    int groups_count;
} Hooks;

static int hooks_traverse(Hooks *hooks, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(hooks));
    Py_VISIT(hooks->state);
    Py_VISIT(hooks->collectives);
    Py_VISIT(hooks->tensor);
    Py_VISIT(hooks->off);
    Py_VISIT(hooks->waited_for);
    Py_VISIT(hooks->inside);
    Py_VISIT(hooks->numbers);
    return 0;
}

static int hooks_clear(Hooks *hooks)
{
    Py_CLEAR(hooks->state);
    Py_CLEAR(hooks->ring);
    Py_CLEAR(hooks->collectives);
    Py_CLEAR(hooks->tensor);
    Py_CLEAR(hooks->off);
    Py_CLEAR(hooks->waited_for);
    Py_CLEAR(hooks->inside);
    Py_CLEAR(hooks->numbers);
    return 0;
}

static void hooks_free(Hooks *hooks)
{
    PyTypeObject *type = Py_TYPE(hooks);
    PyObject_GC_UnTrack(hooks);
    hooks_clear(hooks);
    for (int at = 0; at < hooks->groups_count; at++) {
        Py_XDECREF(hooks->groups[at].reference);
        Py_XDECREF(hooks->groups[at].latest[0]);
        Py_XDECREF(hooks->groups[at].latest[1]);
    }
    PyMem_Free(hooks->groups);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hooks);
    Py_DECREF(type);
}

static PyObject *hooks_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *state, *ring, *collectives, *tensor, *off, *waited_for, *inside;
    if (!PyArg_ParseTuple(args, "O!O!OOO!O!O!", STATE, &state, RING, &ring, &collectives, &tensor, &PySet_Type, &off,
                          &PyDict_Type, &waited_for, &PyDict_Type, &inside))
        return NULL;
    Hooks *hooks = (Hooks *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (hooks == NULL) return NULL;
    PyObject **kept[] = {(PyObject **)&hooks->state, (PyObject **)&hooks->ring, &hooks->collectives, &hooks->tensor,
                         &hooks->off,                &hooks->waited_for,         &hooks->inside};
    PyObject *given[] = {state, ring, collectives, tensor, off, waited_for, inside};
    for (size_t at = 0; at < sizeof kept / sizeof *kept; at++) {
        Py_INCREF(given[at]);
        *kept[at] = given[at];
    }
    hooks->numbers = PyDict_New();
    if (hooks->numbers != NULL) return (PyObject *)hooks;
    Py_DECREF(hooks);
    return NULL;
}

/* The entry of a process group that is known; NULL, without an error, if it is not. `dead`: one to use again. */
static Group *known_group(Hooks *hooks, PyObject *group, Group **dead)
{
    *dead = NULL;
    for (int at = 0; at < hooks->groups_count; at++) {
        Group *known = hooks->groups + at;
        if (PyWeakref_GetObject(known->reference) == Py_None)
            *dead = known;
        else if (known->group == group)
            return known;
    }
    return NULL;
}

/* The entry of a process group, which any call of Python may move; NULL with an error. */
static Group *group_of(Hooks *hooks, PyObject *group)
{
    Group *place, *known = known_group(hooks, group, &place);
    if (known != NULL) return known;
    PyObject *number = PyObject_CallMethod(hooks->collectives, "group_number", "(O)", group);
    if (number == NULL) return NULL;
    Group added = {.group = group, .reference = PyWeakref_NewRef(group, NULL), .number = PyLong_AsLongLong(number)};
    Py_DECREF(number);
    if (added.reference == NULL) return NULL;
    Group before = {.group = NULL};
    known_group(hooks, group, &place); /* once more: other threads may have run */
    if (place != NULL) {
        before = *place;
    } else {
        Group *more = PyMem_Realloc(hooks->groups, (size_t)(hooks->groups_count + 1) * sizeof *more);
        if (more == NULL) {
            Py_DECREF(added.reference);
            PyErr_NoMemory();
            return NULL;
        }
        hooks->groups = more;
        place = more + hooks->groups_count++;
    }
    *place = added;
    Py_XDECREF(before.reference);
    Py_XDECREF(before.latest[0]);
    Py_XDECREF(before.latest[1]);
    return known_group(hooks, group, &place);
}

/* ---- a hook: calls what it hooks, and records the call ------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    Hooks *hooks;
    PyObject *(*call)(void *, PyObject *, PyObject *);
    PyObject *name, *original, *module;
    Py_ssize_t group_at;
    long long number; /* of the name; -1: not known yet */
    int without_future;
} Hook;

static int hook_traverse(Hook *hook, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(hook));
    Py_VISIT(hook->hooks);
    Py_VISIT(hook->original);
    Py_VISIT(hook->module);
    return 0;
}

static int hook_clear(Hook *hook)
{
    Py_CLEAR(hook->hooks);
    Py_CLEAR(hook->name);
    Py_CLEAR(hook->original);
    Py_CLEAR(hook->module);
    return 0;
}

static void hook_free(Hook *hook)
{
    PyTypeObject *type = Py_TYPE(hook);
    PyObject_GC_UnTrack(hook);
    hook_clear(hook);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(hook);
    Py_DECREF(type);
}

static PyObject *hook_call(Hook *hook, PyObject *args, PyObject *kwargs) { return hook->call(hook, args, kwargs); }

/* Report an error of the hook itself and clear it. Returns 0, or -1 if it is none that a hook may keep to itself. */
static int reported(Hook *hook)
{
    PyObject *type, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done = PyObject_CallMethod((PyObject *)hook->hooks->state, "failed", "OO", hook->name, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Whether the hook is on; one that is off counts the call. -1 with an error. */
static int is_on(Hook *hook)
{
    int off = PySet_Size(hook->hooks->off) == 0 ? 0 : PySet_Contains(hook->hooks->off, hook->name);
    if (off <= 0) return off == 0 ? 1 : -1;
    PyObject *done = PyObject_CallMethod((PyObject *)hook->hooks->state, "skip", "O", hook->name);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int in_main_thread(const State *state) { return PyThread_get_thread_ident() == state->thread_id; }

/* When a collective starts, which may be the first op of a step; -1 with an error. */
static int64_t begins(Hooks *hooks)
{
    State *state = hooks->state;
    int settled = !state->step_over && (state->held == NULL || state->held == Py_None);
    if (settled || state->busy != 0 || !in_main_thread(state)) return monotonic_ns();
    PyObject *start = PyObject_CallMethod((PyObject *)state, "begin_host_op", NULL);
    if (start == NULL) return -1;
    int64_t start_ns = PyLong_AsLongLong(start);
    Py_DECREF(start);
    return start_ns;
}

/* Set the field of the current step. Returns whether it fits. */
static int set_step(const State *state, Fields fields)
{
    int too_large;
    long long step = PyLong_AsLongLongAndOverflow(state->step, &too_large); /* an integer: Session sees to it */
    return !too_large && set_field(fields, STEP, step);
}

/* Set the fields of a collective of the current step. Returns 1, 0 if one does not fit, -1 with an error. */
static int describe(Hook *hook, int flags, long long group, int64_t start, long long size, Fields fields)
{
    State *state = hook->hooks->state;
    if (hook->number < 0) {
        PyObject *number = PyObject_CallMethod((PyObject *)state, "name", "O", hook->name);
        if (number == NULL) return -1;
        hook->number = PyLong_AsLongLong(number);
        Py_DECREF(number);
    }
    long long values[FIELDS_COUNT] = {COLLECTIVE_OP, flags, hook->number, 0, NONE, NONE, group, start, 0, size};
    int fit = 1;
    for (int field = 0; field < FIELDS_COUNT; field++) fit &= set_field(fields, field, values[field]);
    fit &= set_step(state, fields);
    if (!fit) ring_drop(hook->hooks->ring);
    return fit;
}

/* Keep `op` among those in `ops` under an address, and let go of it. Returns 0, or -1 with an error. */
static int keep_under(PyObject *ops, const void *address, UnderWay *op)
{
    PyObject *key = PyLong_FromVoidPtr((void *)address);
    int kept = key == NULL ? -1 : PyDict_SetItem(ops, key, (PyObject *)op);
    Py_XDECREF(key);
    Py_DECREF(op);
    return kept;
}

/* Take the op out of `ops` that is there under an address. 1 and the op, owned; 0 and NULL if none is; -1: error. */
static int take_from(PyObject *ops, PyObject *key, UnderWay **op)
{
    *op = NULL;
    if (key == NULL) return -1;
    PyObject *found = PyDict_GetItemWithError(ops, key);
    if (found == NULL) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(found);
    int removed = PyDict_DelItem(ops, key);
    if (removed == 0 && Py_TYPE(found) == UNDER_WAY) {
        *op = (UnderWay *)found;
        return 1;
    }
    Py_DECREF(found);
    return removed;
}

/* Keep the op that was waited for, if one was, and let go of it. A bucket that a kernel saw is kept by Python: a pair of
 * its work and its op. 0, or -1 with an error.
 */
static int keep_waited(Hooks *hooks, PyObject *key)
{
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(hooks->waited_for, key);
    if (found == NULL) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(found);
    int kept = PyDict_DelItem(hooks->waited_for, key);
    if (kept == 0 && Py_TYPE(found) == UNDER_WAY) {
        ends_now((UnderWay *)found);
    } else if (kept == 0) {
        PyObject *op = PySequence_GetItem(found, 1);
        PyObject *done = op == NULL ? NULL : PyObject_CallMethod((PyObject *)hooks->state, "ended", "(O)", op);
        Py_XDECREF(op);
        Py_XDECREF(done);
        kept = done == NULL ? -1 : 0;
    }
    Py_DECREF(found);
    return kept;
}

/* The bytes of the tensors in the first argument of a collective; -1 with an error. */
static long long size_of(Hooks *hooks, PyObject *first)
{
    if (PyList_Check(first) && PyList_Size(first) == 1) first = PyList_GetItem(first, 0);
    PyObject *size = Py_TYPE(first) == (PyTypeObject *)hooks->tensor
                         ? PyObject_GetAttr(first, NBYTES)
                         : PyObject_CallMethod(hooks->collectives, "bytes_of", "(O)", first);
    if (size == NULL) return -1;
    long long bytes = PyLong_AsLongLong(size);
    Py_DECREF(size);
    return bytes;
}

/* Whether the caller of `torch.distributed` waits itself: if the options, the last argument, say so. -1: error. */
static int caller_waits(Hook *hook, PyObject *args)
{
    Py_ssize_t count = PyTuple_Size(args);
    if (count < 2 || !in_main_thread(hook->hooks->state)) return 0;
    PyObject *asynchronous = PyObject_GetAttr(PyTuple_GetItem(args, count - 1), ASYNC_OP);
    if (asynchronous == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    int waits = PyObject_Not(asynchronous);
    Py_DECREF(asynchronous);
    return waits;
}

/* Have `op` called when the future of `work` completes. 1; 0 if the work has no future; -1 with an error. */
static int call_at_the_end(Hook *hook, PyObject *group, PyObject *work, UnderWay *op)
{
    PyObject *future = PyObject_CallMethodObjArgs(work, GET_FUTURE, NULL);
    if (future == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
        PyErr_Clear();
        hook->without_future = 1;
        return 0;
    }
    Group *known = group_of(hook->hooks, group);
    if (known == NULL) {
        Py_DECREF(future);
        return -1;
    }
    op->owner = known->latest[0]; /* freed where the callback is: on gloo's thread */
    known->latest[0] = known->latest[1];
    Py_INCREF(work);
    known->latest[1] = work;
    Py_INCREF(hook->hooks->state);
    op->state = hook->hooks->state;
    op->state->callbacks++;
    PyObject *done = PyObject_CallMethodObjArgs(future, ADD_DONE_CALLBACK, op, NULL);
    Py_DECREF(future);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

/* Record a collective that was started: once its caller has waited or its future completes. 0, or -1: error. */
static int started(Hook *hook, PyObject *args, int64_t start_ns, PyObject *work)
{
    Hooks *hooks = hook->hooks;
    PyObject *group = PyTuple_GetItem(args, 0);
    Group *known = group_of(hooks, group);
    if (known == NULL) return -1;
    long long number = known->number;
    int waits = caller_waits(hook, args);
    long long size = waits < 0 ? -1 : PyTuple_Size(args) < 2 ? 0 : size_of(hooks, PyTuple_GetItem(args, 1));
    if (size < 0) return PyErr_Occurred() ? -1 : 0;
    Fields fields;
    int fits = describe(hook, waits ? BLOCKING : 0, number, start_ns, size, fields);
    if (fits <= 0) return fits;
    UnderWay *op = under_way(hooks->ring, fields);
    if (op == NULL) return -1;
    if (work == Py_None) { /* it ran in this call */
        ends_now(op);
        Py_DECREF(op);
        return 0;
    }
    /* A blocking caller continues as soon as the collective ends; the thread that completes futures may run late. */
    int called = 0;
    if (!waits && !hook->without_future) {
        called = call_at_the_end(hook, group, work, op);
        if (called != 0) Py_DECREF(op);
    }
    if (called == 0) {
        Py_INCREF(work);
        op->owner = work;
        called = keep_under(hooks->waited_for, work, op);
    }
    if (called < 0 || !(hooks->state->busy || hooks->state->optimizing)) return called < 0 ? -1 : 0;
    set_field(fields, CATEGORY, WAIT_OP);
    set_field(fields, FLAGS, 0);
    set_field(fields, EXTRA, 0);
    UnderWay *wait = under_way(hooks->ring, fields); /* by address: keeping the work would keep its tensors */
    return wait == NULL ? -1 : keep_under(hooks->inside, work, wait);
}

static PyObject *call_collective(void *self, PyObject *args, PyObject *kwargs)
{
    Hook *hook = self;
    int64_t start_ns = -1;
    int on = is_on(hook);
    if (on > 0) start_ns = begins(hook->hooks);
    if ((on < 0 || PyErr_Occurred()) && reported(hook) < 0) return NULL;
    PyObject *work = PyObject_Call(hook->original, args, kwargs);
    if (work == NULL || start_ns < 0) return work;
    if (started(hook, args, start_ns, work) == 0 || reported(hook) == 0) return work;
    Py_DECREF(work);
    return NULL;
}

static PyObject *call_wait(void *self, PyObject *args, PyObject *kwargs)
{
    Hook *hook = self;
    Hooks *hooks = hook->hooks;
    State *state = hooks->state;
    UnderWay *nested = NULL;
    PyObject *key = NULL;
    int64_t start_ns = -1;
    int failed = 0;
    if (PyDict_Size(hooks->inside) + PyDict_Size(hooks->waited_for) > 0) {
        key = PyLong_FromVoidPtr(PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL);
        failed = take_from(hooks->inside, key, &nested) < 0;
        if (nested != NULL && (state->busy || state->optimizing) && in_main_thread(state)) start_ns = monotonic_ns();
    }
    if (failed && reported(hook) < 0) {
        Py_XDECREF(key);
        return NULL;
    }
    PyObject *result = PyObject_Call(hook->original, args, kwargs);
    if (result != NULL && key != NULL) {
        if (start_ns >= 0 && set_step(state, nested->fields)) {
            set_field(nested->fields, START, start_ns);
            ends_now(nested);
        }
        if (keep_waited(hooks, key) < 0 && reported(hook) < 0) Py_CLEAR(result);
    }
    Py_XDECREF(key);
    Py_XDECREF(nested);
    return result;
}

/* The number of the group that a functional collective names: a name, a group, ranks; -1 with an error. */
static long long functional_group(Hook *hook, PyObject *args, PyObject *kwargs)
{
    Hooks *hooks = hook->hooks;
    PyObject *group = kwargs == NULL ? NULL : PyDict_GetItemWithError(kwargs, GROUP);
    if (group == NULL && !PyErr_Occurred()) group = PyTuple_GetItem(args, hook->group_at);
    if (group == NULL) return -1;
    PyObject *known = PyDict_GetItemWithError(hooks->numbers, group);
    if (known != NULL) return PyLong_AsLongLong(known);
    int hashable = !PyErr_Occurred();
    PyErr_Clear(); /* a list of ranks */
    PyObject *number = PyObject_CallMethod(hooks->collectives, "functional_group", "OO", hook->module, group);
    if (number == NULL) return -1;
    long long found = PyLong_AsLongLong(number);
    if (hashable && PyDict_SetItem(hooks->numbers, group, number) < 0) found = -1;
    Py_DECREF(number);
    return found;
}

static PyObject *data_of(PyObject *tensor) { return PyObject_CallMethodObjArgs(tensor, DATA_PTR, NULL); }

/* Record a functional collective once its result has been waited for; at once if nothing waits. 0, or -1: error. */
static int functional_started(Hook *hook, PyObject *args, PyObject *kwargs, int64_t start_ns, PyObject *result)
{
    Hooks *hooks = hook->hooks;
    long long number = functional_group(hook, args, kwargs);
    if (number < 0) return PyErr_Occurred() ? -1 : 0;
    PyObject *waiting = PyObject_GetAttr(result, ELEM);
    if (waiting == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
    }
    PyObject *size = PyObject_GetAttr(waiting == NULL ? result : waiting, NBYTES);
    Fields fields;
    int fits = size == NULL ? -1 : describe(hook, 0, number, start_ns, PyLong_AsLongLong(size), fields);
    Py_XDECREF(size);
    UnderWay *op = fits > 0 ? under_way(hooks->ring, fields) : NULL;
    if (op == NULL) {
        Py_XDECREF(waiting);
        return PyErr_Occurred() ? -1 : 0;
    }
    op->owner = waiting;
    if (waiting == NULL) {
        ends_now(op);
        Py_DECREF(op);
        return 0;
    }
    PyObject *key = data_of(waiting); /* the script may wait for a view of it */
    int kept = key == NULL ? -1 : PyDict_SetItem(hooks->waited_for, key, (PyObject *)op);
    Py_XDECREF(key);
    Py_DECREF(op);
    return kept;
}

static PyObject *call_functional(void *self, PyObject *args, PyObject *kwargs)
{
    Hook *hook = self;
    int64_t start_ns = -1;
    int on = is_on(hook);
    if (on > 0) start_ns = begins(hook->hooks);
    if ((on < 0 || PyErr_Occurred()) && reported(hook) < 0) return NULL;
    PyObject *result = PyObject_Call(hook->original, args, kwargs);
    if (result == NULL || start_ns < 0) return result;
    if (functional_started(hook, args, kwargs, start_ns, result) == 0 || reported(hook) == 0) return result;
    Py_DECREF(result);
    return NULL;
}

static PyObject *call_wait_tensor(void *self, PyObject *args, PyObject *kwargs)
{
    Hook *hook = self;
    PyObject *result = PyObject_Call(hook->original, args, kwargs);
    if (result == NULL || PyDict_Size(hook->hooks->waited_for) == 0 || PyTuple_Size(args) < 1) return result;
    PyObject *key = data_of(PyTuple_GetItem(args, 0));
    int kept = keep_waited(hook->hooks, key);
    Py_XDECREF(key);
    if (kept < 0 && reported(hook) < 0) Py_CLEAR(result);
    return result;
}

/* ---- making hooks ------------------------------------------------------------------------------------------------- */

static PyObject *hook_of(Hooks *hooks, PyObject *(*call)(void *, PyObject *, PyObject *), PyObject *name,
                         PyObject *original, Py_ssize_t group_at, PyObject *module)
{
    Hook *hook = (Hook *)((allocfunc)PyType_GetSlot(HOOK, Py_tp_alloc))(HOOK, 0);
    if (hook == NULL) return NULL;
    Py_INCREF(hooks);
    Py_INCREF(name);
    Py_INCREF(original);
    Py_XINCREF(module);
    hook->hooks = hooks;
    hook->call = call;
    hook->name = name;
    hook->original = original;
    hook->module = module;
    hook->group_at = group_at;
    hook->number = -1;
    return (PyObject *)hook;
}

static PyObject *hooks_collective(Hooks *hooks, PyObject *args)
{
    PyObject *name, *original;
    if (!PyArg_ParseTuple(args, "UO", &name, &original)) return NULL;
    return hook_of(hooks, call_collective, name, original, 0, NULL);
}

static PyObject *hooks_wait(Hooks *hooks, PyObject *args)
{
    PyObject *name, *original;
    if (!PyArg_ParseTuple(args, "UO", &name, &original)) return NULL;
    return hook_of(hooks, call_wait, name, original, 0, NULL);
}

static PyObject *hooks_functional(Hooks *hooks, PyObject *args)
{
    PyObject *name, *original, *module;
    Py_ssize_t group_at;
    if (!PyArg_ParseTuple(args, "UOOn", &name, &original, &module, &group_at)) return NULL;
    return hook_of(hooks, call_functional, name, original, group_at, module);
}

static PyObject *hooks_wait_tensor(Hooks *hooks, PyObject *args)
{
    PyObject *name, *original;
    if (!PyArg_ParseTuple(args, "UO", &name, &original)) return NULL;
    return hook_of(hooks, call_wait_tensor, name, original, 0, NULL);
}

static PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_dealloc, hook_free}, {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear},
    {Py_tp_call, hook_call},    {0, NULL},
};
static PyType_Spec HOOK_SPEC = {"tracekit.collectors.runtime._native.Hook", sizeof(Hook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, HOOK_SLOTS};

static PyMethodDef HOOKS_METHODS[] = {
    {"collective", (PyCFunction)hooks_collective, METH_VARARGS, "Hook a method that starts a collective."},
    {"wait", (PyCFunction)hooks_wait, METH_VARARGS, "Hook the method that waits for one."},
    {"functional", (PyCFunction)hooks_functional, METH_VARARGS, "Hook a function that starts one."},
    {"wait_tensor", (PyCFunction)hooks_wait_tensor, METH_VARARGS, "Hook the function that waits for its result."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot HOOKS_SLOTS[] = {
    {Py_tp_doc, "See PlainHooks."}, {Py_tp_new, hooks_new},     {Py_tp_dealloc, hooks_free},
    {Py_tp_traverse, hooks_traverse}, {Py_tp_clear, hooks_clear}, {Py_tp_methods, HOOKS_METHODS},
    {0, NULL},
};
static PyType_Spec HOOKS_SPEC = {"tracekit.collectors.runtime._native.Hooks", sizeof(Hooks), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, HOOKS_SLOTS};

int add_collectives(PyObject *module)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&ASYNC_OP, "asyncOp"}, {&NBYTES, "nbytes"},           {&ELEM, "elem"},
        {&GROUP, "group"},      {&GET_FUTURE, "get_future"},   {&DATA_PTR, "data_ptr"},
        {&ADD_DONE_CALLBACK, "add_done_callback"},
    };
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (*names[at].name == NULL && (*names[at].name = PyUnicode_InternFromString(names[at].text)) == NULL) return -1;
    PyObject *ring = PyObject_GetAttrString(module, "Ring");
    if (ring == NULL) return -1;
    Py_DECREF(ring); /* the module keeps it */
    RING = (PyTypeObject *)ring;
    if ((STATE = add_type(module, "State", &STATE_SPEC)) == NULL) return -1;
    if ((UNDER_WAY = add_type(module, "UnderWay", &UNDER_WAY_SPEC)) == NULL) return -1;
    if ((HOOK = add_type(module, "Hook", &HOOK_SPEC)) == NULL) return -1;
    return add_type(module, "Hooks", &HOOKS_SPEC) == NULL ? -1 : 0;
}
