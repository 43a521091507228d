/* The extension module tracekit.collectors.runtime._native: what every op and every collective passes through. */
#include "native.h"

PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) return NULL;
    if (PyModule_AddObject(module, name, type) == 0) return (PyTypeObject *)type;
    Py_DECREF(type);
    return NULL;
}

static int fill(PyObject *module) { return add_ring(module) == 0 && add_collectives(module) == 0 ? 0 : -1; }

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef MODULE = {.m_base = PyModuleDef_HEAD_INIT, .m_name = "_native", .m_slots = SLOTS};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
