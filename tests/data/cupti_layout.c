/* Prints the layout of CUPTI's activity records as JSON, from NVIDIA's own header:
 *
 *     gcc -I INCLUDE cupti_layout.c -o layout && ./layout
 *
 * INCLUDE is the folder with cupti.h (nvidia/cu13/include of the wheel nvidia-cuda-cupti,
 * nvidia/cuda_cupti/include of nvidia-cuda-cupti-cu12) and, behind it, one with cuda.h.
 * cupti-layouts.json beside this file holds its output for the versions it names.
 */
#include <stddef.h>
#include <stdio.h>
#include <cupti.h>

#if CUPTI_API_VERSION >= 130000
typedef CUpti_ActivityKernel10 Kernel;
#else
typedef CUpti_ActivityKernel9 Kernel;
#endif
#if CUPTI_API_VERSION >= 26 /* 12.8 */
typedef CUpti_ActivityMemcpy6 Memcpy;
typedef CUpti_ActivitySynchronization2 Synchronization;
typedef CUpti_ActivityUnifiedMemoryCounter3 UnifiedMemory;
#else
typedef CUpti_ActivityMemcpy5 Memcpy;
typedef CUpti_ActivitySynchronization Synchronization;
typedef CUpti_ActivityUnifiedMemoryCounter2 UnifiedMemory;
#endif
#if CUPTI_API_VERSION >= 22 /* 12.4 */
typedef CUpti_ActivityOverhead3 Overhead;
#elif CUPTI_API_VERSION >= 21
typedef CUpti_ActivityOverhead2 Overhead;
#else
typedef CUpti_ActivityOverhead Overhead;
#endif
#if CUPTI_API_VERSION >= 21 /* 12.3 */
typedef CUpti_ActivityGraphTrace2 Graph;
#else
typedef CUpti_ActivityGraphTrace Graph;
#endif
typedef CUpti_ActivityMemset4 Memset;
typedef CUpti_ActivityAPI Call;

#define RECORD(type, name, kind) printf("%s\n  \"%s\": {\"kind\": %d, \"size\": %zu", first++ ? "}," : "", name, kind, sizeof(type))
#define FIELD(type, field) printf(", \"%s\": [%zu, %zu]", #field, offsetof(type, field), sizeof(((type *)0)->field))

#define DRIVER(call) printf("%s\"" #call "\": %d", first++ ? ", " : "", CUPTI_DRIVER_TRACE_CBID_##call)
#define RUNTIME(call) printf("%s\"" #call "\": %d", first++ ? ", " : "", CUPTI_RUNTIME_TRACE_CBID_##call)

#if CUPTI_API_VERSION < 130000 /* one call, renamed */
#define CUPTI_RUNTIME_TRACE_CBID_cudaMemPrefetchAsync_v12020 CUPTI_RUNTIME_TRACE_CBID_cudaMemPrefetchAsync_v2_v12020
#define CUPTI_RUNTIME_TRACE_CBID_cudaMemPrefetchAsync_ptsz_v12020 CUPTI_RUNTIME_TRACE_CBID_cudaMemPrefetchAsync_v2_ptsz_v12020
#endif

int main(void) {
  int first = 0;
  printf("{\"version\": %d, \"records\": {", CUPTI_API_VERSION);
  RECORD(Memcpy, "memcpy", CUPTI_ACTIVITY_KIND_MEMCPY);
  FIELD(Memcpy, copyKind); FIELD(Memcpy, srcKind); FIELD(Memcpy, dstKind); FIELD(Memcpy, flags);
  FIELD(Memcpy, bytes); FIELD(Memcpy, start); FIELD(Memcpy, end); FIELD(Memcpy, deviceId);
  FIELD(Memcpy, contextId); FIELD(Memcpy, streamId); FIELD(Memcpy, correlationId);
  FIELD(Memcpy, runtimeCorrelationId); FIELD(Memcpy, graphNodeId); FIELD(Memcpy, graphId);
  FIELD(Memcpy, channelID);
  RECORD(Memset, "memset", CUPTI_ACTIVITY_KIND_MEMSET);
  FIELD(Memset, bytes); FIELD(Memset, start); FIELD(Memset, end); FIELD(Memset, deviceId);
  FIELD(Memset, contextId); FIELD(Memset, streamId); FIELD(Memset, correlationId);
  FIELD(Memset, memoryKind); FIELD(Memset, graphNodeId); FIELD(Memset, graphId);
  RECORD(Kernel, "kernel", CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  FIELD(Kernel, registersPerThread); FIELD(Kernel, start); FIELD(Kernel, end); FIELD(Kernel, deviceId);
  FIELD(Kernel, contextId); FIELD(Kernel, streamId); FIELD(Kernel, gridX); FIELD(Kernel, gridY);
  FIELD(Kernel, gridZ); FIELD(Kernel, blockX); FIELD(Kernel, blockY); FIELD(Kernel, blockZ);
  FIELD(Kernel, staticSharedMemory); FIELD(Kernel, dynamicSharedMemory);
  FIELD(Kernel, correlationId); FIELD(Kernel, name); FIELD(Kernel, graphNodeId); FIELD(Kernel, graphId);
  RECORD(Call, "driver", CUPTI_ACTIVITY_KIND_DRIVER);
  FIELD(Call, cbid); FIELD(Call, start); FIELD(Call, end); FIELD(Call, processId); FIELD(Call, threadId);
  FIELD(Call, correlationId); FIELD(Call, returnValue);
  RECORD(Call, "runtime", CUPTI_ACTIVITY_KIND_RUNTIME);
  FIELD(Call, cbid); FIELD(Call, start); FIELD(Call, end); FIELD(Call, processId); FIELD(Call, threadId);
  FIELD(Call, correlationId); FIELD(Call, returnValue);
  RECORD(Overhead, "overhead", CUPTI_ACTIVITY_KIND_OVERHEAD);
  FIELD(Overhead, overheadKind); FIELD(Overhead, objectKind); FIELD(Overhead, objectId);
  FIELD(Overhead, start); FIELD(Overhead, end);
  RECORD(UnifiedMemory, "unified_memory", CUPTI_ACTIVITY_KIND_UNIFIED_MEMORY_COUNTER);
  FIELD(UnifiedMemory, counterKind); FIELD(UnifiedMemory, value); FIELD(UnifiedMemory, start);
  FIELD(UnifiedMemory, end); FIELD(UnifiedMemory, address); FIELD(UnifiedMemory, srcId);
  FIELD(UnifiedMemory, dstId); FIELD(UnifiedMemory, streamId); FIELD(UnifiedMemory, processId);
  FIELD(UnifiedMemory, flags);
  RECORD(Synchronization, "synchronization", CUPTI_ACTIVITY_KIND_SYNCHRONIZATION);
  FIELD(Synchronization, type); FIELD(Synchronization, start); FIELD(Synchronization, end);
  FIELD(Synchronization, correlationId); FIELD(Synchronization, contextId);
  FIELD(Synchronization, streamId); FIELD(Synchronization, cudaEventId);
  RECORD(Graph, "graph", CUPTI_ACTIVITY_KIND_GRAPH_TRACE);
  FIELD(Graph, correlationId); FIELD(Graph, start); FIELD(Graph, end); FIELD(Graph, deviceId);
  FIELD(Graph, graphId); FIELD(Graph, contextId); FIELD(Graph, streamId);
  printf("}}");
#if CUPTI_API_VERSION >= 23 /* 12.5: single calls can be chosen */
  first = 0;
  printf(",\n \"calls\": {");
  DRIVER(cuLaunchKernel); DRIVER(cuLaunchKernel_ptsz);
  DRIVER(cuLaunchKernelEx); DRIVER(cuLaunchKernelEx_ptsz);
  DRIVER(cuLaunchCooperativeKernel); DRIVER(cuLaunchCooperativeKernel_ptsz);
  DRIVER(cuGraphLaunch); DRIVER(cuGraphLaunch_ptsz);
  DRIVER(cuMemcpyAsync); DRIVER(cuMemcpyAsync_ptsz);
  DRIVER(cuMemcpyHtoDAsync_v2); DRIVER(cuMemcpyHtoDAsync_v2_ptsz);
  DRIVER(cuMemcpyDtoHAsync_v2); DRIVER(cuMemcpyDtoHAsync_v2_ptsz);
  DRIVER(cuMemcpyDtoDAsync_v2); DRIVER(cuMemcpyDtoDAsync_v2_ptsz);
  DRIVER(cuMemsetD8Async); DRIVER(cuMemsetD8Async_ptsz);
  DRIVER(cuMemsetD32Async); DRIVER(cuMemsetD32Async_ptsz);
  DRIVER(cuMemPrefetchAsync); DRIVER(cuMemPrefetchAsync_ptsz);
  DRIVER(cuMemPrefetchAsync_v2); DRIVER(cuMemPrefetchAsync_v2_ptsz);
  RUNTIME(cudaLaunchKernel_v7000); RUNTIME(cudaLaunchKernel_ptsz_v7000);
  RUNTIME(cudaLaunchKernelExC_v11060); RUNTIME(cudaLaunchKernelExC_ptsz_v11060);
  RUNTIME(cudaLaunchCooperativeKernel_v9000); RUNTIME(cudaLaunchCooperativeKernel_ptsz_v9000);
  RUNTIME(cudaGraphLaunch_v10000); RUNTIME(cudaGraphLaunch_ptsz_v10000);
  RUNTIME(cudaMemcpy_v3020); RUNTIME(cudaMemcpy_ptds_v7000);
  RUNTIME(cudaMemcpyAsync_v3020); RUNTIME(cudaMemcpyAsync_ptsz_v7000);
  RUNTIME(cudaMemcpy2DAsync_v3020); RUNTIME(cudaMemcpy2DAsync_ptsz_v7000);
  RUNTIME(cudaMemset_v3020); RUNTIME(cudaMemset_ptds_v7000);
  RUNTIME(cudaMemsetAsync_v3020); RUNTIME(cudaMemsetAsync_ptsz_v7000);
  RUNTIME(cudaMemPrefetchAsync_v8000); RUNTIME(cudaMemPrefetchAsync_ptsz_v8000);
  RUNTIME(cudaMemPrefetchAsync_v12020); RUNTIME(cudaMemPrefetchAsync_ptsz_v12020);
  printf("}");
#endif
  printf("}\n");
  return 0;
}
