/* The extension module tracekit.analysis.native._native. */
#include "kernels.h"

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL},

static PyMethodDef methods[] = {KERNELS(METHOD){NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = NULL, .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
