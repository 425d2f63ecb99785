# Tests. Programs of tests/<area>/test_*.c see that area's archives only; exit 0 passed, 77 skipped, else failed.

LIBS_TEST := -lcmocka
TEST_AREAS := proto kernels cpu daemon client hostile
AR_proto   := proto
AR_kernels := kernels
AR_cpu     := cpu kernels
AR_daemon  := daemon cpu kernels proto
AR_client  := cli fused kernels proto
AR_hostile := kernels proto

# Fail-the-n-th tests (fault_*.c) are linked with their own allocator and system calls in between.
WRAP := malloc calloc realloc strdup open openat read pread mmap ftruncate fallocate fcntl memfd_create socket accept4 \
        sendmsg recvmsg epoll_ctl eventfd dup aligned_alloc reallocarray bind listen rename fchmod fchownat flock fstat \
        fstatat getsockopt setsockopt timerfd_create connect pthread_create
# What only these areas call.
WRAP_proto   := msgpack_zone_init msgpack_unpack open_memstream ferror fclose
WRAP_kernels := write fsync getrandom strndup
WRAP_FLAGS = $(foreach f,$(WRAP) $(WRAP_$(1)),-Wl,--wrap=$(f))

define area
TESTS_$(1) := $$(patsubst tests/$(1)/%.c,$$(B)/tests/$(1)/%,$$(wildcard tests/$(1)/test_*.c tests/$(1)/fault_*.c))
$$(B)/tests/$(1)/test_%: $$(B)/obj/tests/$(1)/test_%.c.o $(foreach a,$(AR_$(1)),$$(B)/lib$(a).a)
	@mkdir -p $$(@D)
	$$(SAY) LD $$@
	$$(Q)$$(CC) $$(LDFLAGS_) -o $$@ $$^ $$(LIBS_TEST) $(foreach a,$(AR_$(1)),$$(LIBS_$(a))) -pthread
$$(B)/tests/$(1)/fault_%: $$(B)/obj/tests/$(1)/fault_%.c.o $$(B)/obj/tests/fault.c.o $(foreach a,$(AR_$(1)),$$(B)/lib$(a).a)
	@mkdir -p $$(@D)
	$$(SAY) LD $$@
	$$(Q)$$(CC) $$(LDFLAGS_) $(call WRAP_FLAGS,$(1)) -o $$@ $$^ $$(LIBS_TEST) $(foreach a,$(AR_$(1)),$$(LIBS_$(a))) -pthread
endef
$(foreach a,$(TEST_AREAS),$(eval $(call area,$(a))))
FUZZ := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
TESTS := $(foreach a,$(TEST_AREAS),$(TESTS_$(a))) $(FUZZ:%=$(B)/tests/fuzz/%)
.SECONDARY:


CLI_TESTS := $(wildcard tests/cli/*.bats) $(wildcard tests/client/*.sh tests/hostile/*.sh tests/service/*.sh)
RUN := B=$(B) tests/run.sh

tests: $(TESTS) $(B)/fake-backend.so $(B)/tests/service/load $(B)/tests/service/hold stage $(if $(shell command -v dpkg-shlibdeps),deb) ## build the test programs

# Tests of the daemon start it, on the scripted backend too.
$(TESTS_daemon): | $(B)/fused $(B)/fake-backend.so
$(TESTS_client): | $(B)/fused $(B)/fusectl
$(TESTS_hostile): | $(B)/fused $(B)/fake-backend.so
$(B)/tests/hostile/test_host: | $(B)/clock.so

# Tests of device buffers, on hosts without a GPU.
$(B)/tests/client/test_device: | $(B)/fake-backend.so $(B)/fake-cuda.so

$(B)/fake-cuda.so: $(call obj,tests/fake_cuda.c)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -shared -Wl,-soname,libcuda.so.1 -o $@ $^

# The CUDA backend's watcher of the device, on a driver that is none.
$(B)/tests/kernels/test_nvml: $(call obj,kernels/cuda/nvml.c) | $(B)/fake-nvml.so

$(B)/fake-nvml.so: $(call obj,tests/fake_nvml.c)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -shared -Wl,-soname,libnvidia-ml.so.1 -o $@ $^ -pthread

$(B)/clock.so: $(call obj,tests/hostile/clock.c)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -shared -o $@ $^ -ldl

$(B)/fake-backend.so: $(call obj,tests/fake_backend.c) $(B)/libcpu.a $(B)/libkernels.a
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -shared -o $@ $^ $(LIBS_kernels)

# Tests of the service: traffic for it, a thread that hangs, and what a package would install.
$(B)/tests/service/load: $(call obj,tests/service/load.c) $(B)/libfused.a $(B)/libproto.a
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_proto) -pthread

$(B)/tests/service/hold: $(call obj,tests/service/hold.c)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^

stage: all
	$(Q)rm -rf $(B)/stage
	$(Q)$(MAKE) --no-print-directory install DESTDIR=$(abspath $(B))/stage PREFIX=/usr

$(B)/tests/demo: $(call obj,tests/demo.c) $(foreach a,$(AR_client),$(B)/lib$(a).a)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_kernels) $(LIBS_proto)

demo: deps-if-missing ## the main job: both shipped models at real size through a private daemon
	$(Q)$(MAKE) --no-print-directory demo-now

demo-now: all $(B)/tests/demo
	$(Q)B=$(B) tests/demo.sh

check: deps-if-missing ## install what is missing, build, run every test that needs no GPU
	$(Q)$(MAKE) --no-print-directory check-now

check-now: all tests
	$(Q)$(RUN) $(sort $(TESTS)) $(sort $(CLI_TESTS))

asan: ## the suite under address and undefined behaviour sanitizers
	$(Q)$(MAKE) --no-print-directory CUDA=0 SANITIZE=address,undefined B=build/asan check-now

# What has threads, or talks to something that has. Not the fail-the-n-th programs, which fork once for every call, nor
# scripts that fail system calls or limits which the sanitizer's own start needs.
tsan: ## the programs with threads under the thread sanitizer
	$(Q)$(MAKE) --no-print-directory CUDA=0 SANITIZE=thread B=build/tsan check-threads

check-threads: all tests
	$(Q)$(RUN) $(sort $(filter-out $(B)/tests/fuzz/% $(B)/tests/proto/%,$(filter-out $(foreach a,$(TEST_AREAS),$(B)/tests/$(a)/fault_%),$(TESTS))))

lint: ## include arrows, library owners, lengths, format, clang-tidy
	$(Q)tests/lint.sh
	$(Q)tests/tidy.sh $(filter-out -MMD -MP,$(CFLAGS_))


.PHONY: demo demo-now check check-now stage tests asan tsan lint fuzz fuzz-now soak soak-now kills numbers coverage coverage-now

$(B)/tests/bench/bench_cpu: $(call obj,tests/bench/bench_cpu.c) $(foreach a,$(AR_cpu),$(B)/lib$(a).a)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_TEST) $(LIBS_kernels)

bench-cpu: $(B)/tests/bench/bench_cpu ## benchmark of the CPU backend, beside PyTorch where PYTHON has it
	$(Q)$(B)/tests/bench/bench_cpu $(B)/bench-cpu.json

$(B)/tests/bench/bench_serve: $(call obj,tests/bench/bench_serve.c) $(B)/libfused.a $(B)/libproto.a
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_proto)

bench-serve: $(B)/tests/bench/bench_serve $(B)/fused $(B)/fake-backend.so ## what serving adds to bare sockets and timers
	$(Q)B=$(B) $(B)/tests/bench/bench_serve

$(B)/tests/bench/serve_ping: $(call obj,tests/bench/serve_ping.c) $(B)/libfused.a
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_proto)

$(B)/tests/bench/serve_maker: $(call obj,tests/bench/serve_maker.c) $(B)/libfused.a
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_proto)

bench-load: all $(B)/tests/bench/serve_ping $(B)/tests/bench/serve_maker ## the serving table: fusectl bench in several mixes, the cost of a call
	$(Q)B=$(B) tests/bench/serve.sh

# A GPU is where the driver says so; nvcc may be there without one.
bench: ## benchmarks of this machine: backends, then serving; tables, and JSON under $(B)/bench
	$(Q)mkdir -p $(B)/bench
	$(Q)$(MAKE) --no-print-directory $(B)/tests/bench/bench_cpu
	$(Q)$(B)/tests/bench/bench_cpu $(B)/bench/cpu.json
	$(Q)if [ $(CUDA) = 1 ] && [ -e /dev/nvidia0 ]; then $(MAKE) --no-print-directory bench-gpu; else \
	    echo "no GPU here: its benchmarks are left out"; fi
	$(Q)$(MAKE) --no-print-directory bench-serve
	$(Q)$(MAKE) --no-print-directory bench-load

.PHONY: bench bench-cpu bench-serve bench-load

# Soak: the same judgement as in tests/hostile, for MINUTES, and on daemons with a planted leak.
MINUTES ?= 1
$(B)/tests/soak/soak: $(call obj,tests/soak/soak.c) $(foreach a,$(AR_hostile),$(B)/lib$(a).a)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_TEST) $(LIBS_kernels) $(LIBS_proto)

$(B)/leak.so: $(call obj,tests/soak/leak.c)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -shared -o $@ $^ -ldl -pthread

soak-now: $(B)/fused $(B)/fake-backend.so $(B)/tests/soak/soak $(B)/leak.so
	$(Q)B=$(B) tests/soak/soak.sh $(MINUTES)

soak: ## MINUTES=1: every hostile client beside checked traffic; drift fails, and so must planted leaks
	$(Q)$(MAKE) --no-print-directory soak-now

kills: $(B)/fused $(B)/tests/hostile/test_kill ## kill -9 of 1,000 clients and 200 daemons under load
	$(Q)B=$(B) tests/soak/kill.sh

numbers: $(B)/fused $(B)/fake-backend.so $(addprefix $(B)/tests/,hostile/test_kill hostile/test_load daemon/fault_daemon) ## the README's figures of what the daemon bears
	$(Q)B=$(B) tests/soak/numbers.sh

# Some counts are differences of others: with threads they are right only if every counter is.
coverage: ## branch coverage of the decoders and the daemon by the suite
	$(Q)$(MAKE) --no-print-directory CUDA=0 B=$(B)/coverage OPT="-O0 -g" \
	    CFLAGS="--coverage -fprofile-update=atomic -Wno-frame-larger-than" \
	    LDFLAGS=--coverage coverage-now

coverage-now: all tests
	$(Q)find $(B)/obj -name '*.gcda' -delete
	$(Q)$(RUN) $(sort $(filter-out $(TESTS_cpu),$(TESTS))) $(sort $(CLI_TESTS)) >$(B)/suite.log 2>&1; tail -n 1 $(B)/suite.log
	$(Q)B=$(B) tests/coverage.sh

# Fuzzing: every target is built by clang with libFuzzer and both sanitizers, starts from its corpus, and may look for
# SECONDS divided by the number of targets. What it finds in new coverage stays under $(B)/fuzz/found.
SECONDS ?= 60
FUZZ_CC := $(firstword $(shell command -v clang-14 clang))
AR_fuzz := cli daemon fused cpu kernels proto

$(B)/fuzz/fuzz_%: $(B)/obj/tests/fuzz/fuzz_%.c.o $(foreach a,$(AR_fuzz),$(B)/lib$(a).a)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -fsanitize=fuzzer -o $@ $^ $(LIBS_daemon) $(LIBS_cli) $(LIBS_kernels) $(LIBS_proto)

# The same without clang, over the corpus only: a part of the suite.
$(B)/tests/fuzz/fuzz_%: $(B)/obj/tests/fuzz/fuzz_%.c.o $(B)/obj/tests/fuzz/replay.c.o $(foreach a,$(AR_fuzz),$(B)/lib$(a).a)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_daemon) $(LIBS_cli) $(LIBS_kernels) $(LIBS_proto)

fuzz-now: $(FUZZ:%=$(B)/fuzz/%)
	$(Q)B=$(B) tests/fuzz.sh $(SECONDS) $(FUZZ)

fuzz: ## SECONDS=60: every reader of outside bytes, and sequences of verbs, under libFuzzer
	$(Q)$(MAKE) --no-print-directory CUDA=0 B=$(B)/clang CC=$(FUZZ_CC) SANITIZE=address,undefined \
	    CFLAGS="-fsanitize=fuzzer-no-link '-Dtarget_clones(...)=used' -Wno-unknown-warning-option" OPT="-O1 -g" fuzz-now
