/*
 * The ring of one rank, as PlainRing in ring.py, which describes it and is used where this file was not compiled.
 *
 * The GIL serializes all calls, so a record that is counted is whole. Other processes read the memory only after this
 * one has died.
 */
#include "native.h"
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* As in ring.py. */
#define DRAINED_AT 24 /* in the head */
#define SPARE 64
#define AT_ONCE 4096

enum { U8, U16, I32, I64 };
static const struct {
    uint8_t at, type;
} FIELDS[FIELDS_COUNT] = {{0, U8},   {1, U8},   {2, U16},  {4, I32},  {8, I32},
                          {12, I32}, {16, I32}, {20, I64}, {28, I64}, {36, I64}};

struct Ring {
    PyObject_HEAD
    unsigned char *memory;
    size_t size, first_at;
    long long slots, limit, added, drained, dropped;
};

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int handle;
    long long offset, capacity, size;
    static char *names[] = {"handle", "offset", "size", "capacity", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iLLL", names, &handle, &offset, &size, &capacity)) return NULL;
    long long page = sysconf(_SC_PAGESIZE);
    if (capacity < 1 || size < page || capacity > (size - page) / RECORD_SIZE - SPARE) {
        PyErr_SetString(PyExc_ValueError, "the memory is too small for this many records");
        return NULL;
    }
    int flags = handle < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *memory = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, flags, handle, (off_t)offset);
    if (memory == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Ring *ring = (Ring *)allocate(type, 0);
    if (ring == NULL) {
        munmap(memory, (size_t)size);
        return NULL;
    }
    ring->memory = memory;
    ring->size = (size_t)size;
    ring->first_at = (size_t)page;
    ring->limit = capacity;
    ring->slots = capacity + SPARE;
    return (PyObject *)ring;
}

static void ring_free(Ring *ring)
{
    PyTypeObject *type = Py_TYPE(ring);
    munmap(ring->memory, ring->size);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(ring);
    Py_DECREF(type);
}

int set_field(Fields fields, int field, long long value)
{
    unsigned char *to = fields + FIELDS[field].at;
    switch (FIELDS[field].type) {
    case U8:
        *to = (uint8_t)value;
        return value >= 0 && value <= UINT8_MAX;
    case U16: {
        uint16_t narrow = (uint16_t)value;
        memcpy(to, &narrow, sizeof narrow);
        return value >= 0 && value <= UINT16_MAX;
    }
    case I32: {
        int32_t narrow = (int32_t)value;
        memcpy(to, &narrow, sizeof narrow);
        return value >= INT32_MIN && value <= INT32_MAX;
    }
    default: {
        int64_t wide = value;
        memcpy(to, &wide, sizeof wide);
        return 1;
    }
    }
}

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void ring_drop(Ring *ring) { ring->dropped++; }

void ring_keep(Ring *ring, const Fields fields)
{
    if (ring->added - ring->drained >= ring->limit) {
        ring->dropped++;
        return;
    }
    unsigned char *place = ring->memory + ring->first_at + (size_t)(ring->added % ring->slots) * RECORD_SIZE;
    int64_t number = ++ring->added;
    memcpy(place, fields, NUMBER_AT);
    __atomic_thread_fence(__ATOMIC_RELEASE); /* the number comes last: it marks the record as whole */
    memcpy(place + NUMBER_AT, &number, sizeof number);
}

/* Keep a record of so many fields: all, or all but its end, which is now. */
static PyObject *keep(Ring *ring, PyObject *record, Py_ssize_t count)
{
    int64_t end_ns = count < FIELDS_COUNT ? monotonic_ns() : 0;
    if (!PyTuple_Check(record) || PyTuple_Size(record) != count) {
        PyErr_SetString(PyExc_TypeError, "a record is a tuple of integers, one for each field");
        return NULL;
    }
    /* An object with __index__ may run Python, and that another add: no place is taken before the fields are known. */
    Fields fields;
    set_field(fields, END, end_ns);
    for (Py_ssize_t at = 0; at < count; at++) {
        long long value = PyLong_AsLongLong(PyTuple_GetItem(record, at));
        int known = value != -1 || !PyErr_Occurred();
        PyErr_Clear();
        if (!known || !set_field(fields, (int)(at < END ? at : at + FIELDS_COUNT - count), value)) {
            ring_drop(ring);
            Py_RETURN_NONE;
        }
    }
    ring_keep(ring, fields);
    Py_RETURN_NONE;
}

static PyObject *ring_add(Ring *ring, PyObject *record) { return keep(ring, record, FIELDS_COUNT); }

static PyObject *ring_add_until_now(Ring *ring, PyObject *record) { return keep(ring, record, FIELDS_COUNT - 1); }

static PyObject *ring_take(Ring *ring, PyObject *count)
{
    long long most = PyLong_AsLongLong(count);
    if (most == -1 && PyErr_Occurred()) return NULL;
    long long first = ring->drained % ring->slots;
    long long limits[] = {ring->added - ring->drained, ring->slots - first, AT_ONCE};
    for (int at = 0; at < 3; at++)
        if (limits[at] < most) most = limits[at];
    if (most < 0) most = 0;
    const char *from = (const char *)ring->memory + ring->first_at + (size_t)first * RECORD_SIZE;
    return PyBytes_FromStringAndSize(from, (Py_ssize_t)most * RECORD_SIZE);
}

static PyObject *ring_drain(Ring *ring, PyObject *count)
{
    long long freed = PyLong_AsLongLong(count);
    if (freed == -1 && PyErr_Occurred()) return NULL;
    if (freed < 0 || freed > ring->added - ring->drained) {
        PyErr_SetString(PyExc_ValueError, "not that many records are in the ring");
        return NULL;
    }
    ring->drained += freed;
    memcpy(ring->memory + DRAINED_AT, &ring->drained, sizeof ring->drained);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"add", (PyCFunction)ring_add, METH_O, "Keep one record, or drop and count it if the ring is full."},
    {"add_until_now", (PyCFunction)ring_add_until_now, METH_O, "As `add`, for a record without its end, which is now."},
    {"take", (PyCFunction)ring_take, METH_O, "The oldest records, at most so many, as bytes."},
    {"drain", (PyCFunction)ring_drain, METH_O, "Free the space of the oldest records."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef MEMBERS[] = {
    {"limit", T_LONGLONG, offsetof(Ring, limit), 0, NULL},
    {"added", T_LONGLONG, offsetof(Ring, added), READONLY, NULL},
    {"dropped", T_LONGLONG, offsetof(Ring, dropped), READONLY, NULL},
    {"drained", T_LONGLONG, offsetof(Ring, drained), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot SLOTS[] = {
    {Py_tp_new, ring_new},         {Py_tp_dealloc, ring_free},
    {Py_tp_methods, METHODS},      {Py_tp_members, MEMBERS},
    {Py_tp_doc, "See PlainRing."}, {0, NULL},
};
static PyType_Spec SPEC = {"tracekit.collectors.runtime._native.Ring", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, SLOTS};

int add_ring(PyObject *module) { return add_type(module, "Ring", &SPEC) == NULL ? -1 : 0; }
