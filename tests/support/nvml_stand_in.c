/*
 * A stand-in for libnvidia-ml.so.1. What it answers is read from the file NVML_STAND_IN at every call.
 *
 * A line is "DEVICE FIELD VALUE"; device -1 is the library as a whole; the last line of a field counts.
 * Fields have the names of outlast's DeviceSample, in the same units. The value "na" is an answer "not
 * supported". Besides:
 *   count N        devices (-1)
 *   driver V       version of the driver (-1)
 *   no_driver 1    initialisation fails (-1)
 *   hang 1         calls do not return while the line is there (of a device, or -1 for the initialisation)
 *   lost 1         every call ends with "GPU is lost"
 *   lost_after N   the same from the Nth call of the device in a process on
 *   lingers S      seconds for which an ended process keeps its memory, from the first call that finds it ended
 * The processes that compute are the lines "DEVICE PID" of the file NVML_STAND_IN with ".processes". The pids
 * of those whose memory was freed are appended to the one with ".freed".
 * With OLD_DRIVER it lacks the functions that newer drivers have.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, DRIVER_NOT_LOADED = 9, IS_LOST = 15 };
enum { MOST = 64, MOST_ENDED = 1024 };

typedef struct {
    int index;
    long calls;
} device;

static device devices[MOST];

/* Reads a field; returns 1 when it has a value, 0 when it has none, -1 when it is not supported. */
static int look_up(int index, const char *field, char *value, size_t size) {
    const char *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], name[64], text[128];
    int number, found = 0;
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%d %63s %127s", &number, name, text) != 3) continue;
        if (number != index || strcmp(name, field)) continue;
        found = strcmp(text, "na") ? 1 : -1;
        snprintf(value, size, "%s", text);
    }
    fclose(file);
    return found;
}

static double number(int index, const char *field, double otherwise) {
    char text[128];
    return look_up(index, field, text, sizeof text) == 1 ? strtod(text, NULL) : otherwise;
}

static void maybe_hang(int index) {
    while (number(index, "hang", 0) != 0) usleep(10000);
}

/* What every call of a device does first. */
static int begin(device *one) {
    double after = number(one->index, "lost_after", -1);
    one->calls++;
    maybe_hang(one->index);
    if (number(one->index, "lost", 0) != 0 || (after >= 0 && one->calls > after)) return IS_LOST;
    return OK;
}

static int read_number(device *one, const char *field, double otherwise, double *value) {
    char text[128];
    int code = begin(one), found;
    if (code != OK) return code;
    found = look_up(one->index, field, text, sizeof text);
    if (found < 0) return NOT_SUPPORTED;
    *value = found ? strtod(text, NULL) : otherwise;
    return OK;
}

static int read_unsigned(device *one, const char *field, double otherwise, double scale, unsigned *value) {
    double found = 0;
    int code = read_number(one, field, otherwise, &found);
    if (code == OK) *value = (unsigned)(unsigned long long)(found * scale + 0.5);
    return code;
}

static int read_long(device *one, const char *field, double otherwise, unsigned long long *value) {
    double found = 0;
    int code = read_number(one, field, otherwise, &found);
    if (code == OK) *value = (unsigned long long)found;
    return code;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    maybe_hang(-1);
    return number(-1, "no_driver", 0) != 0 ? DRIVER_NOT_LOADED : OK;
}

int nvmlShutdown(void) { return OK; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    char text[128] = "575.57.08";
    look_up(-1, "driver", text, sizeof text);
    snprintf(version, size, "%s", text);
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)number(-1, "count", 2);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **handle) {
    if (index >= MOST || index >= (unsigned)number(-1, "count", 2)) return NOT_FOUND;
    devices[index].index = (int)index;
    *handle = &devices[index];
    return begin(*handle);
}

int nvmlDeviceGetUUID(device *one, char *uuid, unsigned size) {
    char text[128];
    int code = begin(one);
    if (look_up(one->index, "uuid", text, sizeof text) == 1)
        snprintf(uuid, size, "%s", text);
    else
        snprintf(uuid, size, "GPU-stand-in-%d", one->index);
    return code;
}

int nvmlDeviceGetName(device *one, char *name, unsigned size) {
    snprintf(name, size, "NVIDIA stand-in");
    return begin(one);
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char id[32];
} pci;

int nvmlDeviceGetPciInfo_v3(device *one, pci *info) {
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + (unsigned)one->index;
    snprintf(info->id, sizeof info->id, "%08X:%02X:00.0", 0, info->bus);
    return begin(one);
}

int nvmlDeviceGetTemperature(device *one, int sensor, unsigned *value) {
    (void)sensor;
    return read_unsigned(one, "temperature", 45, 1, value);
}

int nvmlDeviceGetTemperatureThreshold(device *one, int kind, unsigned *value) {
    (void)kind;
    return read_unsigned(one, "slowdown", 87, 1, value);
}

int nvmlDeviceGetPowerUsage(device *one, unsigned *value) {
    return read_unsigned(one, "power", 300, 1000, value);
}

int nvmlDeviceGetEnforcedPowerLimit(device *one, unsigned *value) {
    return read_unsigned(one, "power_limit", 700, 1000, value);
}

int nvmlDeviceGetClockInfo(device *one, int clock, unsigned *value) {
    (void)clock;
    return read_unsigned(one, "sm_clock", 1980, 1, value);
}

int nvmlDeviceGetMaxClockInfo(device *one, int clock, unsigned *value) {
    (void)clock;
    return read_unsigned(one, "max_sm_clock", 1980, 1, value);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device *one, unsigned long long *value) {
    return read_long(one, "throttle_reasons", 0, value);
}

typedef struct {
    unsigned gpu, memory;
} rates;

int nvmlDeviceGetUtilizationRates(device *one, rates *value) {
    value->memory = 0;
    return read_unsigned(one, "utilization", 0.97, 100, &value->gpu);
}

typedef struct {
    unsigned long long total, free, used;
} memory;

int nvmlDeviceGetMemoryInfo(device *one, memory *value) {
    int code = read_long(one, "memory_total", 80.0 * (1ull << 30), &value->total);
    if (code == OK) code = read_long(one, "memory_used", 70.0 * (1ull << 30), &value->used);
    value->free = value->total - value->used;
    return code;
}

static struct {
    int pid, freed;
    double since;
} ended[MOST_ENDED];

/* Says whether a process has memory: it lives, or was first found ended less than "lingers" seconds ago. */
static int holds(int index, int pid) {
    char path[4096];
    struct timespec now;
    double seconds;
    int i = 0;
    FILE *file;
    if (kill(pid, 0) == 0 || errno != ESRCH) return 1;
    clock_gettime(CLOCK_MONOTONIC, &now);
    seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    while (i < MOST_ENDED - 1 && ended[i].pid && ended[i].pid != pid) i++;
    if (!ended[i].pid) {
        ended[i].pid = pid;
        ended[i].since = seconds;
    }
    if (ended[i].freed) return 0;
    if (seconds - ended[i].since < number(index, "lingers", 0)) return 1;
    ended[i].freed = 1;
    snprintf(path, sizeof path, "%s.freed", getenv("NVML_STAND_IN"));
    if ((file = fopen(path, "a"))) {
        fprintf(file, "%d\n", pid);
        fclose(file);
    }
    return 0;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process;

static int processes(device *one, unsigned *count, process *found) {
    char path[4096];
    int code = begin(one), index, pid;
    unsigned room = *count, seen = 0;
    FILE *file;
    if (code != OK) return code;
    snprintf(path, sizeof path, "%s.processes", getenv("NVML_STAND_IN"));
    if ((file = fopen(path, "r"))) {
        while (fscanf(file, "%d %d", &index, &pid) == 2) {
            if (index != one->index || !holds(index, pid)) continue;
            if (seen < room) {
                memset(&found[seen], 0, sizeof *found);
                found[seen].pid = (unsigned)pid;
            }
            seen++;
        }
        fclose(file);
    }
    *count = seen;
    return seen > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v2(device *one, unsigned *count, process *found) {
    return processes(one, count, found);
}

int nvmlDeviceGetTotalEccErrors(device *one, int kind, int counter, unsigned long long *value) {
    (void)counter;
    return read_long(one, kind ? "ecc_uncorrected" : "ecc_corrected", 0, value);
}

int nvmlDeviceGetRemappedRows(device *one, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    int code = read_unsigned(one, "remapped_rows_correctable", 0, 1, corrected);
    if (code == OK) code = read_unsigned(one, "remapped_rows_uncorrectable", 0, 1, uncorrected);
    if (code == OK) code = read_unsigned(one, "remap_pending", 0, 1, pending);
    if (code == OK) code = read_unsigned(one, "remap_failed", 0, 1, failed);
    return code;
}

int nvmlDeviceGetCurrPcieLinkWidth(device *one, unsigned *value) {
    return read_unsigned(one, "pcie_width", 16, 1, value);
}

int nvmlDeviceGetMaxPcieLinkWidth(device *one, unsigned *value) {
    return read_unsigned(one, "pcie_max_width", 16, 1, value);
}

int nvmlDeviceGetCurrPcieLinkGeneration(device *one, unsigned *value) {
    return read_unsigned(one, "pcie_generation", 5, 1, value);
}

int nvmlDeviceGetPcieReplayCounter(device *one, unsigned *value) {
    return read_unsigned(one, "pcie_replays", 0, 1, value);
}

#ifndef OLD_DRIVER

int nvmlDeviceGetComputeRunningProcesses_v3(device *one, unsigned *count, process *found) {
    return processes(one, count, found);
}

int nvmlDeviceGetCurrentClocksEventReasons(device *one, unsigned long long *value) {
    return read_long(one, "throttle_reasons", 0, value);
}

typedef struct {
    unsigned version;
    int margin;
} margin;

int nvmlDeviceGetMarginTemperature(device *one, margin *value) {
    double found = 42;
    int code = read_number(one, "temperature_margin", 42, &found);
    value->margin = (int)found;
    return code;
}

typedef struct {
    unsigned field, scope;
    long long time, latency;
    int type, code;
    union {
        double real;
        int whole;
        unsigned plain;
        unsigned long long wide;
    } value;
} field;

int nvmlDeviceGetFieldValues(device *one, int count, field *fields) {
    int code = begin(one), i;
    for (i = 0; code == OK && i < count; i++) {
        double found = 0;
        fields[i].code = NOT_SUPPORTED;
        fields[i].type = 3;
        if (fields[i].field == 230)
            fields[i].code = read_number(one, "recovery_action", 0, &found);
        else if (fields[i].field == 52)
            fields[i].code = read_number(one, "nvlink_errors", 0, &found);
        fields[i].value.wide = (unsigned long long)found;
    }
    return code;
}

#endif
