/* One iteration of a robust fit, for every misfit. */
#include "kernels.h"

KERNEL(proximal_step) {
    ENTER("proximal_step", "dddrr*d*d", 7);
    const double *value = REALS(a[0]), *low = REALS(a[1]), *high = REALS(a[2]);
    const double step = a[3].real, scale = a[4].real;
    double *multiplier = REALS(a[5]), *target = REALS(a[6]);
    const int64_t count_values = AXIS(a[0], 0);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < count_values; i++) {
        const double wanted = value[i] + multiplier[i];
        const double lowest = low[i] < wanted + step ? low[i] : wanted + step;
        const double highest = high[i] > wanted - step ? high[i] : wanted - step;
        double copy = wanted > lowest ? wanted : lowest;
        copy = copy < highest ? copy : highest;
        multiplier[i] = (wanted - copy) * scale;
        target[i] = copy - multiplier[i];
    }
    Py_END_ALLOW_THREADS
    LEAVE(Py_NewRef(Py_None));
}
