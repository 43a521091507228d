/* Passes over the rows of a trace. _rows.pyi describes them and their arguments. */
#include "arguments.h"

/* Whether each stream has every seq below its count once. `next`: how many ops each stream has. */
static int complete(const int32_t *cell, const uint8_t *kind, const int32_t *seq, int64_t rows, int64_t kinds,
                    int32_t *next, int64_t streams, uint8_t *taken) {
    for (int64_t i = 0; i < rows; i++)
        if (seq[i] >= next[cell[i] * kinds + kind[i]]) return 0;
    int32_t begin = 0;
    for (int64_t stream = 0; stream < streams; stream++) {
        const int32_t ops = next[stream];
        next[stream] = begin;
        begin += ops;
    }
    for (int64_t i = 0; i < rows; i++) {
        uint8_t *place = &taken[next[cell[i] * kinds + kind[i]] + seq[i]];
        if (*place) return 0;
        *place = 1;
    }
    return 1;
}

static KERNEL(are_identified) {
    ENTER("are_identified", "iiBin*i", 6);
    const int32_t *cell = INT32S(a[0]), *rank = INT32S(a[1]), *seq = INT32S(a[3]);
    const uint8_t *kind = BYTES(a[2]);
    const int64_t rows = AXIS(a[0], 0), kinds = a[4].integer, cells = AXIS(a[5], 0);
    int32_t *rank_of = INT32S(a[5]);
    int32_t *next = PyMem_Calloc((size_t)(cells * kinds), sizeof *next);
    uint8_t *taken = PyMem_Calloc((size_t)rows, 1);
    int ok = 1, in_order = 1;
    if (next && taken) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; i < rows; i++) {
            if (rank_of[cell[i]] < 0) rank_of[cell[i]] = rank[i];
            ok &= rank_of[cell[i]] == rank[i];
            in_order &= seq[i] == next[cell[i] * kinds + kind[i]]++;
        }
        if (ok && !in_order) ok = complete(cell, kind, seq, rows, kinds, next, cells * kinds, taken);
        Py_END_ALLOW_THREADS
    }
    PyObject *found = next && taken ? PyBool_FromLong(ok) : PyErr_NoMemory();
    PyMem_Free(next);
    PyMem_Free(taken);
    LEAVE(found);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {METHOD(are_identified), {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_doc = NULL, .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&definition); }
