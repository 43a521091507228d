/* Passes over the rows of a trace. _rows.pyi describes them and their arguments. */
#include "arguments.h"

static KERNEL(count) {
    ENTER("count", "iiBn*i*i", 6);
    const int32_t *cell = INT32S(a[0]), *rank = INT32S(a[1]);
    const uint8_t *kind = BYTES(a[2]);
    const int64_t rows = AXIS(a[0], 0), kinds = a[3].integer, cells = AXIS(a[4], 0);
    int32_t *rank_of = INT32S(a[4]), *counts = INT32S(a[5]);
    int one_rank = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++) {
        if (cell[i] < 0 || cell[i] >= cells) { /* of a file that is being changed */
            one_rank = 0;
            break;
        }
        if (rank_of[cell[i]] < 0) rank_of[cell[i]] = rank[i];
        one_rank &= rank_of[cell[i]] == rank[i];
        counts[cell[i] * kinds + kind[i]]++;
    }
    Py_END_ALLOW_THREADS
    LEAVE(PyBool_FromLong(one_rank));
}

static KERNEL(find_places) {
    ENTER("find_places", "iBini*B*i", 7);
    const int32_t *cell = INT32S(a[0]), *seq = INT32S(a[2]), *first = INT32S(a[4]);
    const uint8_t *kind = BYTES(a[1]);
    const int64_t rows = AXIS(a[0], 0), kinds = a[3].integer, streams = AXIS(a[4], 0) - 1;
    uint8_t *filled = BYTES(a[5]);
    int32_t *place = INT32S(a[6]);
    int once = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows && once; i++) {
        const int64_t stream = cell[i] * kinds + kind[i];
        if (!(once = stream >= 0 && stream < streams)) break;
        if (!(once = seq[i] < first[stream + 1] - first[stream])) break;
        const int32_t at = place[i] = first[stream] + seq[i];
        const uint8_t bit = (uint8_t)(1 << at % 8);
        once = !(filled[at / 8] & bit);
        filled[at / 8] |= bit;
    }
    Py_END_ALLOW_THREADS
    LEAVE(PyBool_FromLong(once));
}

/* Put each value into its place. */
#define PUT(name, code, type)                                        \
    static KERNEL(name) {                                            \
        ENTER(#name, code "i*" code, 3);                             \
        const type *values = a[0].view.buf;                          \
        const int32_t *place = INT32S(a[1]);                         \
        const int64_t rows = AXIS(a[0], 0);                          \
        type *out = a[2].view.buf;                                   \
        Py_BEGIN_ALLOW_THREADS                                       \
        for (int64_t i = 0; i < rows; i++) out[place[i]] = values[i]; \
        Py_END_ALLOW_THREADS                                         \
        LEAVE(Py_NewRef(Py_None));                                   \
    }

PUT(put_4_bytes, "i", int32_t)
PUT(put_8_bytes, "l", int64_t)

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {METHOD(count), METHOD(find_places), METHOD(put_4_bytes), METHOD(put_8_bytes), {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_doc = NULL, .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&definition); }
