/* A libnvidia-ml.so.1 with one GPU: 1980 MHz, every fourth sample throttled by heat at 1200 MHz. */
#include <string.h>

static unsigned samples;

static int hot(void) { return samples % 4 == 3; }

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    strncpy(version, "580.00.01", length);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &samples;
    return strcmp(uuid, "GPU-5a3f0c1e-0000-4000-8000-000000000007") ? 6 : 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = &samples;
    return strcmp(bus, "00000000:1B:00.0") ? 6 : 0;
}

int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *mhz) {
    if (device != &samples || clock != 1) return 2;
    *mhz = hot() ? 1200 : 1980;
    return 0;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    if (device != &samples || sensor != 0) return 2;
    *celsius = hot() ? 88 : 61;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    if (device != &samples) return 2;
    *milliwatts = 654321;
    return 0;
}

/* Only the old name: drivers before 535 have no other. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    if (device != &samples) return 2;
    *reasons = hot() ? 0x48 : 0x1;
    samples++;
    return 0;
}
