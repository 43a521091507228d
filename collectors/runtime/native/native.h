/* What the files of the extension module tracekit.collectors.runtime._native share. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#if defined(Py_GIL_DISABLED) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Python code is used here: threads would need locks, or fields another order of bytes"
#endif

/* RECORD of wire_format.py: its fields in order, and the number of the record behind them. */
enum { CATEGORY, FLAGS, NAME, STEP, MICROBATCH, CHUNK, PEER, START, END, EXTRA, FIELDS_COUNT };
#define NUMBER_AT 44
#define RECORD_SIZE 52
typedef unsigned char Fields[NUMBER_AT];

typedef struct Ring Ring;

int64_t monotonic_ns(void);

/* Set one field. Returns whether the value fits. */
int set_field(Fields fields, int field, long long value);

/* Keep one record, or drop and count it if the ring is full. */
void ring_keep(Ring *ring, const Fields fields);

/* Count a record that could not be kept. */
void ring_drop(Ring *ring);

/* Add the types of a file to the module; 0, or -1 with an error. */
int add_ring(PyObject *module);
int add_collectives(PyObject *module);

/* Add one type to the module. Returns it, borrowed, or NULL with an error. */
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);
