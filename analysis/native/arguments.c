#include "arguments.h"

#include <string.h>

/* Return whether a buffer's `format` is the element type that `code` stands for. */
static int holds(const Py_buffer *view, char code) {
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || *format == '<') format++;
    if (format[0] == '\0' || format[1] != '\0') return 0;
    switch (code) {
    case 'b': return *format == '?';
    case 'B': return *format == 'B';
    case 'h': return *format == 'h';
    case 'i': return (*format == 'i' || *format == 'l') && view->itemsize == 4;
    case 'l': return (*format == 'l' || *format == 'q') && view->itemsize == 8;
    case 'u': return (*format == 'L' || *format == 'Q') && view->itemsize == 8;
    case 'd': return *format == 'd';
    default: return 0;
    }
}

static int take_array(const char *function, Py_ssize_t index, char code, int writable, PyObject *value, Argument *out) {
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(value, &out->view, flags) < 0) {
        out->view.obj = NULL;
        return -1;
    }
    if (holds(&out->view, code)) return 0;
    PyErr_Format(PyExc_TypeError, "%s: argument %zd has elements '%s', expected '%c'", function, index + 1,
                 out->view.format ? out->view.format : "B", code);
    PyBuffer_Release(&out->view);
    out->view.obj = NULL;
    return -1;
}

int arguments_take(const char *function, const char *spec, PyObject *const *args, Py_ssize_t count, Argument *out) {
    Py_ssize_t index = 0;
    for (const char *code = spec; *code; code++, index++) {
        int writable = *code == '*';
        if (writable) code++;
        if (index >= count) break;
        out[index].view.obj = NULL;
        int failed = 0;
        if (*code == 'n') {
            out[index].integer = PyLong_AsLongLong(args[index]);
            failed = out[index].integer == -1 && PyErr_Occurred();
        } else if (*code == 'r') {
            out[index].real = PyFloat_AsDouble(args[index]);
            failed = out[index].real == -1.0 && PyErr_Occurred();
        } else {
            failed = take_array(function, index, *code, writable, args[index], &out[index]);
        }
        if (failed) {
            arguments_release(out, index);
            return -1;
        }
    }
    Py_ssize_t expected = (Py_ssize_t)strlen(spec);
    for (const char *code = spec; *code; code++) expected -= *code == '*';
    if (count == expected) return 0;
    arguments_release(out, index);
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, expected, count);
    return -1;
}

void arguments_release(Argument *arguments, Py_ssize_t count) {
    for (Py_ssize_t index = 0; index < count; index++)
        if (arguments[index].view.obj) PyBuffer_Release(&arguments[index].view);
}
