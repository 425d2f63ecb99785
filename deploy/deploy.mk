# Dependencies of a fresh machine, installation.

SYSCONFDIR    ?= $(if $(filter /usr,$(PREFIX)),/etc,$(PREFIX)/etc)
LOCALSTATEDIR ?= $(if $(filter /usr,$(PREFIX)),/var,$(PREFIX)/var)
INSTALL       := install
MAN           := $(patsubst deploy/man/%.scd,$(B)/man/%,$(wildcard deploy/man/*.scd))

$(B)/man/%: deploy/man/%.scd
	@mkdir -p $(@D)
	$(SAY) MAN $@
	$(Q)scdoc <$< >$@

deps: ## install what building and testing needs (Debian 12; root or sudo)
	$(Q)deploy/install-deps.sh

# What a newcomer types first calls this: installs only when something is missing, and nothing with DEPS=0.
deps-if-missing:
	$(Q)[ '$(DEPS)' = 0 ] || deploy/install-deps.sh --check 2>/dev/null || $(MAKE) --no-print-directory deps

# What systemd reads. The files in the tree say where a package with PREFIX=/usr installs; the template for several instances
# is made of the unit for one, so that its sandbox cannot lag behind.
UNIT_DIR := $(DESTDIR)$(PREFIX)/lib/systemd/system
UNIT_FOR := -e 's|/usr/bin/|$(PREFIX)/bin/|' -e 's|/etc/fused/|$(SYSCONFDIR)/fused/|'
UNIT_TEMPLATE := -e 's|^Description=.*|& (%i)|' -e 's|fused\.socket|fused@%i.socket|' -e 's|/fused\.conf$$|/%i.conf|' \
                 -e 's|/run/fused/fused\.sock|/run/fused/%i.sock|'

install-service: all # which says whether there is a backend that needs the driver's modules
	$(Q)$(INSTALL) -d $(UNIT_DIR) $(addprefix $(DESTDIR)$(PREFIX)/lib/,sysusers.d tmpfiles.d)
	$(Q)for u in service socket; do \
	    sed $(UNIT_FOR) deploy/systemd/fused.$$u >$(UNIT_DIR)/fused.$$u && \
	    sed $(UNIT_FOR) -e '1,/^$$/d' deploy/systemd/fused.$$u | \
	        sed $(UNIT_TEMPLATE) >$(UNIT_DIR)/fused@.$$u && \
	    chmod 644 $(UNIT_DIR)/fused.$$u $(UNIT_DIR)/fused@.$$u || exit 1; done
	$(Q)for d in sysusers.d tmpfiles.d; do \
	    $(INSTALL) -m 644 deploy/$$d/fused.conf $(DESTDIR)$(PREFIX)/lib/$$d/ || exit 1; done
	$(Q)[ ! -e $(B)/fused-cuda.so ] || { $(INSTALL) -d $(DESTDIR)$(PREFIX)/lib/modules-load.d && \
	    $(INSTALL) -m 644 deploy/modules-load.d/fused.conf $(DESTDIR)$(PREFIX)/lib/modules-load.d/; }

# The daemon's own defaults are the places of PREFIX=/usr; for others the installed file names them.
CONF_FOR := -e '' $(if $(filter /etc,$(SYSCONFDIR)),,-e 's|^\#models_dir = "/etc/|models_dir = "$(SYSCONFDIR)/|') \
            $(if $(filter /var,$(LOCALSTATEDIR)),,-e 's|^\#weights_dir = "/var/|weights_dir = "$(LOCALSTATEDIR)/|')

# What the README points to has the same path beside it in an installation.
DOC  := $(DESTDIR)$(PREFIX)/share/doc/fused
DOCS := README.md SECURITY.md proto/PROTOCOL.md kernels/README.md kernels/cuda/BENCH.md $(wildcard tests/*/README.md)

install: all $(MAN) install-service ## install under DESTDIR and PREFIX
	$(SAY) INSTALL $(DESTDIR)$(PREFIX)
	$(Q)$(INSTALL) -d $(addprefix $(DESTDIR)$(PREFIX)/,bin lib/pkgconfig include lib/fused share/doc/fused/models.d)
	$(Q)$(INSTALL) -m 755 $(B)/fused $(B)/fusectl $(DESTDIR)$(PREFIX)/bin/
	$(Q)$(INSTALL) -m 644 $(B)/libfused.so.1 $(B)/libfused.a $(DESTDIR)$(PREFIX)/lib/
	$(Q)ln -sf libfused.so.1 $(DESTDIR)$(PREFIX)/lib/libfused.so
	$(Q)$(INSTALL) -m 644 $(B)/fused.pc $(DESTDIR)$(PREFIX)/lib/pkgconfig/
	$(Q)$(INSTALL) -m 644 client/fused.h $(DESTDIR)$(PREFIX)/include/
	$(Q)[ ! -e $(B)/fused-cuda.so ] || $(INSTALL) -m 644 $(B)/fused-cuda.so $(DESTDIR)$(PREFIX)/lib/fused/
	$(Q)for d in $(DOCS); do $(INSTALL) -D -m 644 $$d $(DOC)/$$d || exit 1; done
	$(Q)$(INSTALL) -m 644 client/example.c $(DOC)/
	$(Q)$(INSTALL) -m 644 config/models.d/*.conf $(DOC)/models.d/
	$(Q)for m in $(MAN); do d=$(DESTDIR)$(PREFIX)/share/man/man$${m##*.}; $(INSTALL) -d $$d && $(INSTALL) -m 644 $$m $$d/; done
	$(Q)$(INSTALL) -d $(DESTDIR)$(SYSCONFDIR)/fused/models.d $(DESTDIR)$(LOCALSTATEDIR)/lib/fused/weights
	$(Q)c=$(DESTDIR)$(SYSCONFDIR)/fused/fused.conf; [ -e $$c ] || { sed $(CONF_FOR) config/fused.conf >$$c && chmod 644 $$c; }

# What is the administrator's stays: models, weights, and fused.conf once it was changed. Folders that are not fused's own stay, too.
INSTALLED := $(addprefix bin/,fused fusectl) $(addprefix lib/,libfused.so libfused.so.1 libfused.a pkgconfig/fused.pc) include/fused.h \
    lib/fused/fused-cuda.so $(addprefix lib/systemd/system/,fused.service fused.socket fused@.service fused@.socket) \
    $(addsuffix /fused.conf,lib/sysusers.d lib/tmpfiles.d lib/modules-load.d) \
    $(foreach m,$(notdir $(MAN)),share/man/man$(subst .,,$(suffix $(m)))/$(m)) \
    $(addprefix share/doc/fused/,$(DOCS) example.c $(patsubst config/%,%,$(wildcard config/models.d/*.conf)))

uninstall: ## remove what install put there; models, weights and a changed fused.conf stay
	$(SAY) REMOVE $(DESTDIR)$(PREFIX)
	$(Q)rm -f $(addprefix $(DESTDIR)$(PREFIX)/,$(INSTALLED))
	$(Q)c=$(DESTDIR)$(SYSCONFDIR)/fused/fused.conf; ! sed $(CONF_FOR) config/fused.conf | cmp -s - $$c || rm -f $$c
	$(Q)for d in $(DESTDIR)$(PREFIX)/lib/fused $(DOC) $(DESTDIR)$(SYSCONFDIR)/fused $(DESTDIR)$(LOCALSTATEDIR)/lib/fused; do \
	    [ ! -d $$d ] || find $$d -depth -type d -exec rmdir --ignore-fail-on-non-empty {} +; done

# Who answers for the package: whoever publishes one gives a name and an address.
MAINTAINER ?= fused maintainers <maintainers@fused.invalid>

deb: ## a Debian package of it under $(B)
	$(Q)rm -rf $(B)/deb
	$(Q)$(MAKE) --no-print-directory install DESTDIR=$(abspath $(B))/deb/root PREFIX=/usr
	$(Q)B=$(B) deploy/deb.sh $(VERSION) '$(MAINTAINER)'

.PHONY: deps deps-if-missing install install-service uninstall deb
