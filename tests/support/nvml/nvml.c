/* A node's GPUs as NVIDIA's management library tells of them, played from a file: for tests without a GPU.
 *
 * Only what Evertrain asks for, with declarations of its own. The file ($FAKE_NVML_STATE) has lines `<gpu> <key> <value>`,
 * a later line replaces an earlier one, and gpu -1 is the machine. `xid` and `pid` lines add up (pid 0: nobody any more);
 * an event set tells codes that were written after it was made. Compiled with -DOLD_DRIVER, functions that came with
 * later drivers are missing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_GPUS 16
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_SPACE = 7, TIMEOUT = 10, IS_LOST = 15 };

typedef struct { int index; } device_t;
typedef struct { unsigned gpus; long told; } event_set_t;
typedef struct { device_t *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned version; int sensor; int temperature; } temperature_t;
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_t;
typedef struct {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  union { double d; unsigned u; unsigned long long ull; } value;
} field_t;

static device_t devices[MAX_GPUS];


static int read_line(FILE *file, int *gpu, char *key, long long *value) {
  return fscanf(file, "%d %31s %lld", gpu, key, value) == 3;
}

static long long state(int gpu, const char *wanted, long long otherwise) {
  const char *path = getenv("FAKE_NVML_STATE");
  FILE *file = path ? fopen(path, "r") : NULL;
  char key[32];
  long long value;
  int at;
  if (!file) return otherwise;
  while (read_line(file, &at, key, &value))
    if (at == gpu && !strcmp(key, wanted)) otherwise = value;
  fclose(file);
  return otherwise;
}

static long nth_xid(long wanted, int *gpu, long long *code) {
  const char *path = getenv("FAKE_NVML_STATE");
  FILE *file = path ? fopen(path, "r") : NULL;
  char key[32];
  long long value;
  int at;
  long count = 0;
  if (!file) return 0;
  while (read_line(file, &at, key, &value))
    if (!strcmp(key, "xid") && count++ == wanted) *gpu = at, *code = value;
  fclose(file);
  return count;
}

static void wait_ms(long long ms) {
  struct timespec span = {ms / 1000, ms % 1000 * 1000000};
  if (ms > 0) nanosleep(&span, NULL);
}

/* What every question about a device answers first. */
static int trouble(device_t *device) {
  return state(device->index, "lost", 0) ? IS_LOST : (int)state(device->index, "error", OK);
}

static int answer(device_t *device, const char *key, long long otherwise, unsigned *value) {
  int result = trouble(device);
  long long known = state(device->index, key, otherwise);
  if (result != OK) return result;
  if (known < 0) return NOT_SUPPORTED;
  *value = (unsigned)known;
  return OK;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  for (int i = 0; i < MAX_GPUS; i++) devices[i].index = i;
  return (int)state(-1, "init", OK);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) {
  return result == TIMEOUT ? "Timeout" : result == IS_LOST ? "GPU is lost" : "played error";
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  snprintf(version, length, "%s", "550.54.15");
  return OK;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)state(-1, "gpus", 2);
  return (int)state(-1, "count_error", OK);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
  if (index >= (unsigned)state(-1, "gpus", 2)) return INVALID;
  *device = &devices[index];
  return OK;
}
int nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned length) {
  snprintf(uuid, length, "GPU-%04d", device->index);
  return trouble(device);
}
int nvmlDeviceGetPciInfo_v3(device_t *device, pci_t *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 0x10u + (unsigned)device->index;
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
  return trouble(device);
}
int nvmlDeviceGetTemperature(device_t *device, int sensor, unsigned *value) {
  (void)sensor;
  wait_ms(state(device->index, "delay_ms", 0));
  return answer(device, "temperature", 40, value);
}
int nvmlDeviceGetTemperatureThreshold(device_t *device, int threshold, unsigned *value) {
  return threshold == 1 ? answer(device, "slowdown", 87, value) : NOT_SUPPORTED;
}
int nvmlDeviceGetUtilizationRates(device_t *device, utilisation_t *rates) {
  rates->memory = 0;
  return answer(device, "utilisation", 0, &rates->gpu);
}
int nvmlDeviceGetClockInfo(device_t *device, int clock, unsigned *value) {
  (void)clock;
  return answer(device, "clock", 1980, value);
}
int nvmlDeviceGetCurrPcieLinkWidth(device_t *device, unsigned *value) { return answer(device, "width", 16, value); }
int nvmlDeviceGetMaxPcieLinkWidth(device_t *device, unsigned *value) { return answer(device, "width_max", 16, value); }
int nvmlDeviceGetCurrPcieLinkGeneration(device_t *device, unsigned *value) {
  return answer(device, "generation", 5, value);
}
int nvmlDeviceGetMaxPcieLinkGeneration(device_t *device, unsigned *value) {
  return answer(device, "generation_max", 5, value);
}
int nvmlDeviceGetTotalEccErrors(device_t *device, int kind, int counter, unsigned long long *value) {
  unsigned count = 0;
  int result = kind == 1 && counter == 0 ? answer(device, "ecc", 0, &count) : NOT_SUPPORTED;
  *value = count;
  return result;
}
int nvmlDeviceGetNvLinkState(device_t *device, unsigned link, unsigned *active) {
  if (link >= state(device->index, "links", 4)) return INVALID;
  *active = !(state(device->index, "links_down", 0) >> link & 1);
  return trouble(device);
}
static unsigned long long throttle(device_t *device) { return (unsigned long long)state(device->index, "throttle", 0); }
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t *device, unsigned long long *reasons) {
  *reasons = throttle(device);
  return trouble(device);
}

int nvmlEventSetCreate(event_set_t **set) {
  int gpu;
  long long code;
  if (!(*set = calloc(1, sizeof **set))) return NO_SPACE;
  (*set)->told = nth_xid(-1, &gpu, &code);
  return OK;
}
int nvmlEventSetFree(event_set_t *set) {
  free(set);
  return OK;
}
int nvmlDeviceRegisterEvents(device_t *device, unsigned long long types, event_set_t *set) {
  if (!(types & 8) || state(device->index, "no_events", 0)) return NOT_SUPPORTED;
  set->gpus |= 1u << device->index;
  return OK;
}
int nvmlEventSetWait_v2(event_set_t *set, event_t *event, unsigned limit_ms) {
  for (unsigned waited = 0;; waited++) {
    int gpu = -1;
    long long code = 0;
    long count = nth_xid(set->told, &gpu, &code);
    if (set->told < count) {
      set->told++;
      if (gpu < 0 || !(set->gpus >> gpu & 1)) continue;
      *event = (event_t){.device = &devices[gpu], .type = 8, .data = (unsigned long long)code};
      return OK;
    }
    if (waited >= limit_ms) return TIMEOUT;
    wait_ms(1);
  }
}

#ifndef OLD_DRIVER
int nvmlDeviceGetTemperatureV(device_t *device, temperature_t *reading) {
  unsigned value = 0;
  int result = nvmlDeviceGetTemperature(device, reading->sensor, &value);
  reading->temperature = (int)value;
  return result;
}
int nvmlDeviceGetCurrentClocksEventReasons(device_t *device, unsigned long long *reasons) {
  *reasons = throttle(device);
  return trouble(device);
}
int nvmlDeviceGetRemappedRows(device_t *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
  *corrected = 0;
  *uncorrected = (unsigned)state(device->index, "remapped", 0);
  *pending = (unsigned)state(device->index, "pending", 0);
  *failed = (unsigned)state(device->index, "failed", 0);
  return trouble(device);
}
int nvmlDeviceGetFieldValues(device_t *device, int count, field_t *fields) {
  for (int i = 0; i < count; i++) {
    fields[i].result = fields[i].field == 230 || fields[i].field == 91 ? OK : NOT_SUPPORTED;
    fields[i].value.u = (unsigned)(fields[i].field == 91 ? state(device->index, "links", 4)
                                                         : state(device->index, "recovery", 0));
  }
  return trouble(device);
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *processes) {
  const char *path = getenv("FAKE_NVML_STATE");
  FILE *file = path ? fopen(path, "r") : NULL;
  process_t found[64];
  unsigned number = 0;
  char key[32];
  long long value;
  int at, result = trouble(device);
  wait_ms(state(device->index, "list_delay_ms", 0));
  while (file && number < 64 && read_line(file, &at, key, &value))
    if (at == device->index && !strcmp(key, "pid")) {
      if (value)
        found[number++] = (process_t){.pid = (unsigned)value};
      else
        number = 0;
    }
  if (file) fclose(file);
  if (result != OK) return result;
  if (*count < number) {
    *count = number;
    return NO_SPACE;
  }
  memcpy(processes, found, number * sizeof *found);
  *count = number;
  return OK;
}
#endif
