# fused: make help lists the verbs.
#
# Variables: CUDA=0 leaves the GPU backend out, ARCH=90a the GPU architecture(s), SANITIZE=address,undefined | thread,
# WERROR=1 makes warnings fatal, V=1 shows commands, B=build the folder that everything lands in, DEPS=0 installs nothing.

SHELL   := /bin/bash
MAKEFLAGS += --no-builtin-rules
VERSION := 1.0.0
PREFIX  ?= /usr/local
DESTDIR ?=
V       ?= 0
DEPS    ?= 1
WERROR  ?= 0
SANITIZE ?=
NVCC    ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc))
CUDA    ?= $(if $(NVCC),1,0)
ARCH    ?= 90a
B       ?= build$(if $(SANITIZE),/$(firstword $(subst $(comma), ,$(SANITIZE))))
comma   := ,
Q       := $(if $(filter 1,$(V)),,@)
SAY      = $(if $(filter 1,$(V)),@:,@printf '  %-8s %s\n')

CC      ?= cc
ifeq ($(origin CC),default)
CC      := cc
endif
OPT     ?= -O2 -g
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Walloca -Wformat=2 -Wundef \
           -Wframe-larger-than=8192 $(if $(filter 1,$(WERROR)),-Werror)
# Resolvers of target_clones run before the thread sanitizer is ready, and crash in it: one copy of each function then.
SAN     := $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer) \
           $(if $(findstring thread,$(SANITIZE)),'-Dtarget_clones(...)=used')
# The sanitizers check more, and clash with it.
HARDEN  := $(if $(SANITIZE),,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)
CFLAGS_ := -std=gnu17 $(OPT) $(WARN) $(SAN) -fPIC -fvisibility=hidden -fstack-clash-protection -fstack-protector-strong $(HARDEN) -ffp-contract=off \
           -D_GNU_SOURCE -DFUSED_VERSION='"$(VERSION)"' -I. $(CFLAGS)
LDFLAGS_ := $(SAN) -Wl,--as-needed -Wl,-z,now -Wl,-z,relro $(LDFLAGS)

LIBS_proto   := -lmsgpackc
LIBS_kernels := -lconfig -ljansson -ldnnl -lgomp -lm -pthread
LIBS_daemon  := -luv -lsystemd -ldl
LIBS_cli     := -ljansson -lconfig -lm

# One archive a folder: what it holds knows nothing to its right.
SRC_proto   := $(wildcard proto/*.c)
SRC_kernels := $(wildcard kernels/*.c)
SRC_cpu     := $(wildcard kernels/cpu/*.c)
SRC_daemon  := $(filter-out daemon/main.c,$(wildcard daemon/*.c))
SRC_lib     := client/fused.c client/ask.c client/calls.c client/link.c client/rejoin.c client/device.c
SRC_cli     := $(filter-out $(SRC_lib) client/fusectl.c client/example.c,$(wildcard client/*.c))
obj = $(patsubst %,$(B)/obj/%.o,$(1))

all: $(B)/fused $(B)/fusectl $(B)/libfused.so $(B)/libfused.a $(B)/fused.pc $(if $(filter 1,$(CUDA)),$(B)/fused-cuda.so) ## build everything that this machine can

$(B)/obj/%.c.o: %.c $(B)/.flags
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(CC) $(CFLAGS_) $(CFLAGS_$(<D)) -MMD -MP -c -o $@ $<

# Hot loops: more unrolling, and instruction sets chosen when the program starts (target_clones).
CFLAGS_kernels     := -O3
CFLAGS_kernels/cpu := -O3

define archive
$(B)/lib$(1).a: $(call obj,$(SRC_$(1)))
	$$(SAY) AR $$@
	$$(Q)rm -f $$@ && ar rcsD $$@ $$^
endef
$(foreach a,proto kernels cpu daemon cli,$(eval $(call archive,$(a))))

$(B)/fused: $(call obj,daemon/main.c) $(B)/libdaemon.a $(B)/libcpu.a $(B)/libkernels.a $(B)/libproto.a
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_daemon) $(LIBS_kernels) $(LIBS_proto)

$(B)/fusectl: $(call obj,client/fusectl.c) $(B)/libcli.a $(B)/libfused.a $(B)/libkernels.a $(B)/libproto.a
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -o $@ $^ $(LIBS_cli) $(LIBS_proto)

# The shared library exports what fused.map lists and nothing else.
$(B)/libfused.so.1: $(call obj,$(SRC_lib) $(SRC_proto)) client/fused.map
	$(SAY) LD $@
	$(Q)$(CC) $(LDFLAGS_) -shared -Wl,-soname,libfused.so.1 -Wl,--version-script=client/fused.map -Wl,--no-undefined-version \
	    -o $@ $(filter %.o,$^) $(LIBS_proto)

$(B)/libfused.so: $(B)/libfused.so.1
	$(Q)ln -sf libfused.so.1 $@

$(B)/libfused.a: $(call obj,$(SRC_lib) $(SRC_proto))
	$(SAY) AR $@
	$(Q)rm -f $@ && ar rcsD $@ $^

# PREFIX is known to nothing else that is built, so installing elsewhere builds nothing again.
$(B)/fused.pc: client/fused.pc.in FORCE
	@mkdir -p $(@D)
	$(Q)sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' $< >$@

# A changed flag, compiler or version rebuilds: the stamp is touched only when its text changes.
FLAGS_TEXT := $(CC) $(CFLAGS_) $(LDFLAGS_) $(NVCC) $(ARCH) $(VERSION)
$(B)/.flags: FORCE
	@mkdir -p $(@D)
	@echo '$(subst ','\'',$(FLAGS_TEXT))' | cmp -s - $@ || echo '$(subst ','\'',$(FLAGS_TEXT))' >$@

include $(wildcard kernels/cuda/cuda.mk)
include tests/tests.mk
include deploy/deploy.mk

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'
	@sed -n '3,4s/^# /  /p' Makefile

format: ## format every source file
	$(Q)clang-format -i $$(git ls-files '*.[ch]' '*.cu' '*.cuh')

clean: ## remove what was built
	rm -rf $(B)

FORCE:
.PHONY: all help format clean FORCE
.DELETE_ON_ERROR:
-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
