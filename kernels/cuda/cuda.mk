# The CUDA backend: fused-cuda.so, its faulty twin for tests, GPU tests, benchmarks and the bundle for a GPU host.
# Included by the Makefile everywhere; adds nothing to `all` where CUDA=0.

CUDA_HOME  ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_CFLAGS := -isystem $(CUDA_HOME)/include
CFLAGS_kernels/cuda := $(CUDA_CFLAGS)

# 90a is code for that chip alone; a plain number also carries PTX for newer ones.
gencode = -gencode arch=compute_$(1),code=$(if $(filter %a,$(1)),sm_$(1),[sm_$(1)$(comma)compute_$(1)])
NVCCFLAGS := -std=c++17 -O3 -lineinfo -fmad=false -I. $(foreach a,$(ARCH),$(call gencode,$(a))) \
             -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas \
             $(if $(filter 1,$(WERROR)),-Werror all-warnings)

# What ptxas says of every kernel is kept beside the object. In the products a spill or a serialised wgmma is an error.
$(B)/obj/%.cu.o: %.cu $(B)/.flags kernels/cuda/ptxas.sh
	@mkdir -p $(@D)
	$(SAY) NVCC $<
	$(Q)$(NVCC) $(NVCCFLAGS) -Xptxas -v -MMD -MP -MF $(@:.o=.d) -MT $@ -c -o $@ $< 2>$(@:.o=.ptxas) || \
	    { cat $(@:.o=.ptxas) >&2; exit 1; }
	$(Q)kernels/cuda/ptxas.sh $< $(@:.o=.ptxas) || { rm -f $@; exit 1; }

SRC_cuda_whole := $(filter-out %/faulty.cu,$(wildcard kernels/cuda/*.cu)) $(filter-out %/faultless.c,$(wildcard kernels/cuda/*.c))
LIBS_cuda := -L$(CUDA_HOME)/lib64 -lcudart_static -lcublasLt -lcudnn -l:libstdc++.a -lconfig -ljansson -lm -ldl -lrt -pthread
# Libraries are looked for beside the bundle's programs, then where the toolkit was.
RPATH_cuda := -Wl,-rpath,'$$ORIGIN/lib:$$ORIGIN/../lib:$(CUDA_HOME)/lib64' -Wl,--exclude-libs,ALL

$(B)/fused-cuda.so: $(call obj,$(SRC_cuda_whole) kernels/cuda/faultless.c) $(B)/libkernels.a
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) $(RPATH_cuda) -shared -Wl,-z,defs -o $@ $^ $(LIBS_cuda)

# Never installed: batches that fault, hang or find no memory on request.
$(B)/fused-cuda-faulty.so: $(call obj,$(SRC_cuda_whole) kernels/cuda/faulty.cu) $(B)/libkernels.a
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) $(RPATH_cuda) -shared -Wl,-z,defs -o $@ $^ $(LIBS_cuda)

# Programs that open the backend at run time. They also run from the bundle, with its libraries in lib/.
GPU_PROGRAMS := $(foreach t,test_gpu_golden test_gpu_random test_gpu_small test_product test_conv test_shifted test_constant test_gpu_batch test_gpu_results \
                  test_gpu_backend eval_gpu way_gpu,$(B)/tests/gpu/$(t)) \
                $(B)/tests/bench/bench_gpu
define gpu_program
$(1): $$(patsubst $(B)/%,$(B)/obj/%.c.o,$(1)) $(B)/libcpu.a $(B)/libkernels.a
	@mkdir -p $$(@D)
	$$(SAY) LD $$@
	$$(Q)$$(CC) $$(LDFLAGS_) -Wl,-rpath,'$$$$ORIGIN/../../lib' -o $$@ $$^ -lcmocka -ldl $$(LIBS_kernels)
endef
$(foreach p,$(GPU_PROGRAMS),$(eval $(call gpu_program,$(p))))

# The kernels of pipeline A alone, without the backend around them.
$(B)/tests/bench/bench_product: $(call obj,tests/bench/bench_product.cu $(SRC_cuda_whole) kernels/cuda/faultless.c) $(B)/libkernels.a
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) $(RPATH_cuda) -o $@ $^ $(LIBS_cuda)

# What serve.sh asks of daemons.
$(B)/tests/gpu/drive: $(call obj,tests/gpu/drive.c) $(B)/libfused.a $(B)/libkernels.a $(B)/libproto.a
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -Wl,-rpath,'$$ORIGIN/../../lib' -o $@ $^ -lcmocka -ldl $(LIBS_kernels) $(LIBS_proto)

$(B)/tests/gpu/filter: $(call obj,tests/gpu/filter.c)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^

.PHONY: gpu check-gpu check-sanitizer bench-gpu bundle
gpu: $(B)/fused $(B)/fusectl $(B)/fused-cuda.so $(B)/fused-cuda-faulty.so $(GPU_PROGRAMS) $(B)/tests/gpu/drive $(B)/tests/gpu/filter \
     $(B)/tests/bench/bench_product

check-gpu: gpu ## the GPU tests
	$(Q)B=$(B) tests/gpu/run.sh check

check-sanitizer: gpu ## GPU tests under compute-sanitizer
	$(Q)B=$(B) tests/gpu/run.sh sanitizer

bench-gpu: gpu ## benchmarks of the GPU backend, beside PyTorch where python3 has it
	$(Q)B=$(B) tests/gpu/run.sh bench

bundle: all gpu $(B)/tests/demo $(B)/tests/bench/serve_ping $(B)/tests/bench/serve_maker ## one archive to unpack and run on a GPU host without packages
	$(Q)B=$(B) deploy/bundle.sh
