/* A libcuda.so.1 without a GPU; __init__.py beside this file says what it is and what it checks.
 *
 * Device memory is a range of host memory. What is queued on a stream is Work: it is executed at
 * once, or kept in a graph while the stream is being captured. A launch calls back. Functions have
 * the driver's own names and parameters; whatever else is asked for is "not found".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, ILLEGAL_STATE = 401, CAPTURE_IMPLICIT = 906
};
enum { DEVICES = 8, GRANULE = 256, BLOCKS = 1 << 16, PARAMETERS = 256, DEPTH = 32, MAPPED = 1 << 30 };
enum { RELAXED = 2 };  /* the mode of capture that forbids nothing */

typedef struct { int device; } Context;
typedef struct { int is_elf; size_t size; int device; char image[]; } Module;
typedef struct {
  Module *module;
  int dynamic_shared, parameters, bytes[PARAMETERS];
  char name[];
} Function;
typedef struct { size_t start, size; int device, is_taken, is_live; } Block;
typedef struct {
  enum { LAUNCH, COPY, FILL, ALLOCATE, FREE } kind;
  Function *function;
  unsigned grid[3], block[3], shared;
  char slots[PARAMETERS][8];
  char *to;
  const char *from;
  size_t size;
  int value;
} Work;
typedef struct Graph {
  Work *work;
  size_t count;
  int mode, has_ended, is_invalid, is_blocking;
} Graph;
typedef struct { int device, is_blocking; Graph *capturing; } Stream;
typedef struct { Graph *graph; } Event;
typedef struct Call { const char *name; long count; struct Call *next; } Call;
typedef int (*Launched)(const char *image, const char *name, const unsigned *dimensions,
                        unsigned shared, void **parameters);

static Context contexts[DEVICES] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static Stream default_streams[DEVICES][3];
static Block blocks[BLOCKS];
static char *memory;
static uint16_t *valid;  /* bytes of each granule that belong to a live array */
static size_t block_count, end = GRANULE, in_use, capacity = MAPPED;
static int device_count = 1, major = 9, minor = 0, is_initialized;
static Graph *open_capture;
static Launched launched;
static Call *calls;
static struct { char name[64]; int status; } planned;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local Context *stack[DEPTH];
static _Thread_local int depth, thread_mode;

/* What tests set and ask. */

void standin_configure(int devices, int cc_major, int cc_minor, size_t bytes, Launched callback) {
  device_count = devices, major = cc_major, minor = cc_minor, capacity = bytes, launched = callback;
}

void standin_fail(const char *name, int status) {
  snprintf(planned.name, sizeof planned.name, "%s", name);
  planned.status = status;
}

/* Of one function, or of all if the name is NULL. */
long standin_count(const char *name) {
  long count = 0;
  for (Call *call = calls; call; call = call->next)
    if (!name || !strcmp(call->name, name)) count += call->count;
  return count;
}

char *standin_memory(uint16_t **bytes) { return *bytes = valid, memory; }

size_t standin_in_use(void) { return in_use; }

/* The beginning of every function: it is counted, and fails if a test has planned that. */

static int entered(Call *call) {
  pthread_mutex_lock(&lock);
  if (!call->count++) call->next = calls, calls = call;
  int status = planned.status && !strcmp(planned.name, call->name) ? planned.status : SUCCESS;
  if (status) planned.status = SUCCESS;
  pthread_mutex_unlock(&lock);
  return status;
}

#define ENTER(function) \
  static Call this_call = {#function, 0, NULL}; \
  int status = entered(&this_call); \
  if (status) return status; \
  if (!is_initialized) return NOT_INITIALIZED

/* The same for what is not allowed while a stream is captured, unless that or the thread's mode was
 * relaxed. */
#define ENTER_UNCAPTURED(function) \
  ENTER(function); \
  if (open_capture && open_capture->mode != RELAXED && thread_mode != RELAXED) \
    return invalidated(CAPTURE_UNSUPPORTED)

static int invalidated(int status) {
  open_capture->is_invalid = 1;
  return status;
}

static Context *current(void) { return depth ? stack[depth - 1] : NULL; }

/* Memory: blocks with a gap behind each, used again by requests of the same size. */

static void mark(const Block *block, int is_live) {
  if (!launched) return;  /* there is no emulator to look at it */
  for (size_t at = 0; at < block->size; at += GRANULE) {
    size_t left = block->size - at;
    valid[(block->start + at) / GRANULE] = !is_live ? 0 : left < GRANULE ? left : GRANULE;
  }
  memset(memory + block->start, 0xFF, block->size);  /* NaN */
}

static Block *take(size_t size, int device) {
  Block *found = NULL;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < block_count && !found; i++)
    if (!blocks[i].is_taken && blocks[i].size == size) found = &blocks[i];
  size_t whole = (size + 2 * GRANULE - 1) / GRANULE * GRANULE;
  if (in_use + size > capacity || (!found && (block_count == BLOCKS || end + whole > MAPPED))) {
    pthread_mutex_unlock(&lock);
    return NULL;
  }
  if (!found) {
    found = &blocks[block_count++];
    *found = (Block){.start = end, .size = size};
    end += whole;
  }
  found->is_taken = 1, found->device = device, in_use += size;
  pthread_mutex_unlock(&lock);
  return found;
}

static Block *block_of(uint64_t address) {
  size_t at = address - (uint64_t)memory;
  for (size_t i = 0; i < block_count; i++)
    if (at >= blocks[i].start && at - blocks[i].start < blocks[i].size) return &blocks[i];
  return NULL;
}

static int is_live(const void *address, size_t size) {
  Block *block = block_of((uint64_t)address);
  return !size || (block && block->is_live &&
                   (char *)address + size <= memory + block->start + block->size);
}

/* Streams, graphs and the work on them. */

static int execute(Work *work) {
  Block *block = NULL;
  void *slots[PARAMETERS];
  switch (work->kind) {
    case LAUNCH:
      for (int i = 0; i < PARAMETERS; i++) slots[i] = work->slots[i];
      if (!launched) return SUCCESS;
      return launched(work->function->module->is_elf ? NULL : work->function->module->image,
                      work->function->name, work->grid, work->shared, slots);
    case COPY: memcpy(work->to, work->from, work->size); return SUCCESS;
    case FILL: memset(work->to, work->value, work->size); return SUCCESS;
    case ALLOCATE:
    case FREE:
      block = block_of((uint64_t)work->to);
      block->is_live = work->kind == ALLOCATE;
      mark(block, block->is_live);
  }
  return SUCCESS;
}

static Graph *captured(Stream *stream) {
  if (stream->capturing && stream->capturing->has_ended) stream->capturing = NULL;
  return stream->capturing;
}

/* The stream of a handle, or why it cannot be used. */
static int find(uint64_t handle, Stream **stream) {
  if (!current()) return INVALID_CONTEXT;
  *stream = handle < 3 ? &default_streams[current()->device][handle] : (Stream *)handle;
  if (handle < 2 && open_capture && open_capture->is_blocking && !captured(*stream))
    return invalidated(CAPTURE_IMPLICIT);
  if (handle >= 3 && (*stream)->device != current()->device) return INVALID_HANDLE;
  return SUCCESS;
}

static int submit(uint64_t handle, Work *work) {
  Stream *stream;
  int status = find(handle, &stream);
  if (status) return status;
  Graph *graph = captured(stream);
  if (!graph) return execute(work);
  graph->work = realloc(graph->work, ++graph->count * sizeof *work);
  graph->work[graph->count - 1] = *work;
  return SUCCESS;
}

/* Devices and contexts. */

int cuInit(unsigned flags) {
  pthread_mutex_lock(&lock);
  if (!is_initialized) {
    int rights = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    memory = mmap(NULL, MAPPED, rights, kind, -1, 0);
    valid = calloc(MAPPED / GRANULE, sizeof *valid);
    for (int i = 0; i < DEVICES * 3; i++)
      default_streams[i / 3][i % 3] = (Stream){.device = i / 3, .is_blocking = 1};
    is_initialized = 1;
  }
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }

int cuDeviceGetCount(int *count) { return *count = device_count, SUCCESS; }

int cuDeviceGet(int *device, int ordinal) {
  ENTER(cuDeviceGet);
  if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
  return *device = ordinal, SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device) {
  return snprintf(name, size, "stand-in"), SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  switch (attribute) {
    case 16: return *value = 132, SUCCESS;     /* multiprocessors */
    case 75: return *value = major, SUCCESS;
    case 76: return *value = minor, SUCCESS;
    case 97: return *value = 232448, SUCCESS;  /* bytes of shared memory per block, at most */
    case 115: return *value = 1, SUCCESS;      /* pools */
  }
  return *value = 0, SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = capacity, SUCCESS; }

int cuDevicePrimaryCtxRetain(Context **context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  return *context = &contexts[device], SUCCESS;
}

int cuCtxGetDevice(int *device) {
  ENTER(cuCtxGetDevice);
  if (!current()) return INVALID_CONTEXT;
  return *device = current()->device, SUCCESS;
}

int cuCtxGetCurrent(Context **context) { return *context = current(), SUCCESS; }

int cuCtxSetCurrent(Context *context) {
  ENTER(cuCtxSetCurrent);
  depth = depth ? depth : 1;
  return stack[depth - 1] = context, SUCCESS;
}

int cuCtxPushCurrent_v2(Context *context) {
  ENTER(cuCtxPushCurrent);
  if (depth == DEPTH) return INVALID_VALUE;
  return stack[depth++] = context, SUCCESS;
}

int cuCtxPopCurrent_v2(Context **context) {
  ENTER(cuCtxPopCurrent);
  if (!depth) return INVALID_CONTEXT;
  return *context = stack[--depth], SUCCESS;
}

int cuCtxSynchronize(void) {
  ENTER_UNCAPTURED(cuCtxSynchronize);
  return current() ? SUCCESS : INVALID_CONTEXT;
}

/* Memory, its pools, and copies. */

int cuMemPoolCreate(Context **pool, const int *properties) {
  ENTER(cuMemPoolCreate);  /* allocation type, handle types, location: its type and number */
  return *pool = &contexts[properties[3]], SUCCESS;
}

int cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
  ENTER(cuMemPoolSetAttribute);
  return SUCCESS;
}

int cuDeviceGetDefaultMemPool(Context **pool, int device) {
  ENTER(cuDeviceGetDefaultMemPool);
  return *pool = &contexts[device], SUCCESS;
}

static int allocated(uint64_t *address, size_t size, int device, uint64_t stream) {
  if (!size) return INVALID_VALUE;
  Block *block = take(size, device);
  if (!block) return OUT_OF_MEMORY;
  *address = (uint64_t)memory + block->start;
  Work work = {.kind = ALLOCATE, .to = (char *)*address};
  return submit(stream, &work);
}

int cuMemAllocFromPoolAsync(uint64_t *address, size_t size, Context *pool, uint64_t stream) {
  ENTER(cuMemAllocFromPoolAsync);
  return allocated(address, size, pool->device, stream);
}

int cuMemAllocAsync(uint64_t *address, size_t size, uint64_t stream) {
  ENTER(cuMemAllocAsync);
  return current() ? allocated(address, size, current()->device, stream) : INVALID_CONTEXT;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
  ENTER_UNCAPTURED(cuMemAlloc);
  return current() ? allocated(address, size, current()->device, 2) : INVALID_CONTEXT;
}

static int freed(uint64_t address, uint64_t handle) {
  Stream *stream;
  int status = find(handle, &stream);
  if (status || !address) return status;
  Block *block = block_of(address);
  if (!block || address != (uint64_t)memory + block->start) return INVALID_VALUE;
  if (!captured(stream)) {  /* a graph's arrays stay its own */
    if (!block->is_live) return INVALID_VALUE;
    block->is_taken = 0;
    in_use -= block->size;
  }
  Work work = {.kind = FREE, .to = (char *)address};
  return submit(handle, &work);
}

int cuMemFreeAsync(uint64_t address, uint64_t stream) {
  ENTER(cuMemFreeAsync);
  return freed(address, stream);
}

int cuMemFree_v2(uint64_t address) {
  ENTER_UNCAPTURED(cuMemFree);
  return freed(address, 2);
}

int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  ENTER_UNCAPTURED(cuMemHostAlloc);
  return (*address = malloc(size)) ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *address) {
  ENTER_UNCAPTURED(cuMemFreeHost);
  return free(address), SUCCESS;
}

int cuMemGetInfo_v2(size_t *left, size_t *total) {
  ENTER(cuMemGetInfo);
  return *left = capacity - in_use, *total = capacity, SUCCESS;
}

int cuPointerGetAttribute(int *value, int attribute, uint64_t address) {
  ENTER(cuPointerGetAttribute);
  Block *block = block_of(address);
  if (attribute != 9 || !block) return INVALID_VALUE;
  return *value = block->device, SUCCESS;
}

static int copied(char *to, const char *from, size_t size, const char *there, uint64_t stream) {
  Work work = {.kind = COPY, .to = to, .from = from, .size = size};
  Stream *found;
  int status = find(stream, &found);
  if (!status && !captured(found) && !is_live(there, size)) status = INVALID_VALUE;
  return status ? status : submit(stream, &work);
}

int cuMemcpyHtoDAsync_v2(char *to, const char *from, size_t size, uint64_t stream) {
  ENTER(cuMemcpyHtoDAsync);
  return copied(to, from, size, to, stream);
}

int cuMemcpyDtoHAsync_v2(char *to, const char *from, size_t size, uint64_t stream) {
  ENTER(cuMemcpyDtoHAsync);
  return copied(to, from, size, from, stream);
}

int cuMemcpyDtoDAsync_v2(char *to, const char *from, size_t size, uint64_t stream) {
  ENTER(cuMemcpyDtoDAsync);
  return copied(to, from, size, to, stream);
}

int cuMemcpyHtoD_v2(char *to, const char *from, size_t size) {
  ENTER_UNCAPTURED(cuMemcpyHtoD);
  return copied(to, from, size, to, 0);
}

int cuMemcpyDtoH_v2(char *to, const char *from, size_t size) {
  ENTER_UNCAPTURED(cuMemcpyDtoH);
  return copied(to, from, size, from, 0);
}

int cuMemsetD8Async(char *to, unsigned char value, size_t size, uint64_t stream) {
  ENTER(cuMemsetD8Async);
  Work work = {.kind = FILL, .to = to, .value = value, .size = size};
  return is_live(to, size) || open_capture ? submit(stream, &work) : INVALID_VALUE;
}

int cuMemsetD8_v2(char *to, unsigned char value, size_t size) {
  ENTER_UNCAPTURED(cuMemsetD8);
  Work work = {.kind = FILL, .to = to, .value = value, .size = size};
  return is_live(to, size) ? submit(0, &work) : INVALID_VALUE;
}

/* Streams and events. */

int cuStreamCreate(Stream **stream, unsigned flags) {
  ENTER(cuStreamCreate);
  if (!current()) return INVALID_CONTEXT;
  *stream = malloc(sizeof **stream);
  **stream = (Stream){.device = current()->device, .is_blocking = !(flags & 1)};
  return SUCCESS;
}

int cuStreamDestroy_v2(Stream *stream) {
  ENTER(cuStreamDestroy);
  return free(stream), SUCCESS;
}

int cuStreamGetCtx(uint64_t handle, Context **context) {
  ENTER(cuStreamGetCtx);
  if (handle < 3) return *context = current(), current() ? SUCCESS : INVALID_CONTEXT;
  return *context = &contexts[((Stream *)handle)->device], SUCCESS;
}

int cuStreamSynchronize(uint64_t handle) {
  ENTER(cuStreamSynchronize);
  Stream *stream;
  if ((status = find(handle, &stream))) return status;
  return captured(stream) ? invalidated(CAPTURE_UNSUPPORTED) : SUCCESS;
}

int cuEventCreate(Event **event, unsigned flags) {
  ENTER(cuEventCreate);
  return *event = calloc(1, sizeof **event), SUCCESS;
}

int cuEventRecord(Event *event, uint64_t handle) {
  ENTER(cuEventRecord);
  Stream *stream;
  if ((status = find(handle, &stream))) return status;
  return event->graph = captured(stream), SUCCESS;
}

int cuStreamWaitEvent(uint64_t handle, Event *event, unsigned flags) {
  ENTER(cuStreamWaitEvent);
  Stream *stream;
  if ((status = find(handle, &stream))) return status;
  if (event->graph && !event->graph->has_ended) stream->capturing = event->graph;
  return SUCCESS;
}

int cuEventSynchronize(Event *event) {
  ENTER(cuEventSynchronize);
  return SUCCESS;
}

int cuEventElapsedTime_v2(float *milliseconds, Event *first, Event *last) {
  ENTER(cuEventElapsedTime);
  return *milliseconds = 1, SUCCESS;
}

int cuEventElapsedTime(float *milliseconds, Event *first, Event *last) {
  return cuEventElapsedTime_v2(milliseconds, first, last);
}

int cuEventDestroy_v2(Event *event) {
  ENTER(cuEventDestroy);
  return free(event), SUCCESS;
}

/* Captured graphs. */

int cuStreamBeginCapture_v2(uint64_t handle, int mode) {
  ENTER(cuStreamBeginCapture);
  Stream *stream;
  if ((status = find(handle, &stream))) return status;
  if (!handle) return CAPTURE_UNSUPPORTED;
  if (open_capture) return ILLEGAL_STATE;
  open_capture = stream->capturing = calloc(1, sizeof(Graph));
  open_capture->mode = mode, open_capture->is_blocking = stream->is_blocking;
  return SUCCESS;
}

int cuStreamEndCapture(uint64_t handle, Graph **graph) {
  ENTER(cuStreamEndCapture);
  Stream *stream;
  if ((status = find(handle, &stream))) return status;
  if (!captured(stream)) return ILLEGAL_STATE;
  *graph = stream->capturing;
  (*graph)->has_ended = 1, open_capture = NULL;
  if (!(*graph)->is_invalid) return SUCCESS;
  return *graph = NULL, CAPTURE_INVALIDATED;
}

int cuStreamIsCapturing(uint64_t handle, int *state) {
  ENTER(cuStreamIsCapturing);
  Stream *stream;
  if ((status = find(handle, &stream))) return status;
  return *state = !captured(stream) ? 0 : 1 + stream->capturing->is_invalid, SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  int before = thread_mode;
  return thread_mode = *mode, *mode = before, SUCCESS;
}

int cuGraphInstantiateWithFlags(Graph **executable, Graph *graph, uint64_t flags) {
  ENTER(cuGraphInstantiate);
  return *executable = graph, SUCCESS;
}

int cuGraphLaunch(Graph *graph, uint64_t stream) {
  ENTER(cuGraphLaunch);
  for (size_t i = 0; i < graph->count; i++) {
    Work *work = &graph->work[i];
    int is_upload = work->kind == COPY && block_of((uint64_t)work->to);
    if (work->kind == COPY && !is_live(is_upload ? work->to : work->from, work->size))
      return INVALID_VALUE;
    if ((status = submit(stream, work))) return status;
  }
  return SUCCESS;
}

int cuGraphExecDestroy(Graph *graph) {
  ENTER(cuGraphExecDestroy);
  return SUCCESS;
}

int cuGraphDestroy(Graph *graph) {
  ENTER(cuGraphDestroy);
  return SUCCESS;
}

/* Modules, functions and launches. A module is PTX, which the driver accepts too, or an ELF. */

int cuModuleLoadData(Module **module, const char *image) {
  ENTER_UNCAPTURED(cuModuleLoadData);
  if (!current()) return INVALID_CONTEXT;
  int is_elf = !memcmp(image, "\177ELF", 4);
  if (!is_elf && !strstr(image, ".visible .entry")) return INVALID_IMAGE;
  size_t size = is_elf ? 0 : strlen(image) + 1;
  *module = malloc(sizeof **module + size);
  **module = (Module){.is_elf = is_elf, .size = size, .device = current()->device};
  memcpy((*module)->image, image, size);
  return SUCCESS;
}

int cuModuleUnload(Module *module) {
  ENTER(cuModuleUnload);
  return free(module), SUCCESS;
}

/* How many bytes each parameter of a kernel in PTX has: ".param .b32 name" has 4. */
static void measure(Function *function) {
  const char *at = strstr(function->module->image, ".visible .entry"), *last = strchr(at, ')');
  while ((at = strstr(at, ".param ")) && at < last && function->parameters < PARAMETERS) {
    at = strchr(at, '.') + 1;
    while (*at != '.') at++;
    function->bytes[function->parameters++] = atoi(at + 2) / 8;
  }
}

int cuModuleGetFunction(Function **function, Module *module, const char *name) {
  ENTER(cuModuleGetFunction);
  if (!module->is_elf && !strstr(module->image, name)) return NOT_FOUND;
  *function = calloc(1, sizeof **function + strlen(name) + 1);
  (*function)->module = module;
  strcpy((*function)->name, name);
  if (!module->is_elf) measure(*function);
  return SUCCESS;
}

int cuFuncSetAttribute(Function *function, int attribute, int value) {
  ENTER(cuFuncSetAttribute);
  if (attribute == 8) function->dynamic_shared = value;
  return attribute == 8 && value > 232448 ? INVALID_VALUE : SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, Function *function) {
  ENTER(cuFuncGetAttribute);
  return *value = 0, SUCCESS;
}

int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                   uint64_t stream, void **parameters, void **extra) {
  ENTER(cuLaunchKernel);
  int allowed = function->dynamic_shared > 49152 ? function->dynamic_shared : 49152;
  if (!current() || function->module->device != current()->device) return INVALID_HANDLE;
  if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z) return INVALID_VALUE;
  if (grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535) return INVALID_VALUE;
  if ((uint64_t)block_x * block_y * block_z > 1024 || shared > (unsigned)allowed)
    return INVALID_VALUE;
  Work work = {.kind = LAUNCH, .function = function, .grid = {grid_x, grid_y, grid_z},
               .block = {block_x, block_y, block_z}, .shared = shared};
  for (int i = 0; i < function->parameters; i++)
    memcpy(work.slots[i], parameters[i], function->bytes[i]);
  return submit(stream, &work);
}

/* Errors and entry points. */

int cuGetErrorString(int error, const char **text) { return *text = "the stand-in says so", 0; }

int cuGetErrorName(int error, const char **text) { return *text = "CUDA_ERROR_OF_STANDIN", 0; }

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *found) {
  static void *self;
  char versioned[256];
  if (!self) self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *address = dlsym(self, versioned);
  if (!*address) *address = dlsym(self, name);
  if (found) *found = *address ? 0 : 1;
  return *address ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, address, version, flags, NULL);
}
