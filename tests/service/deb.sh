#!/bin/bash
# The package: installed, upgraded under load, removed and purged under a real systemd, and the daemon run from it.
package=$(ls -t "${B:-build}"/fused_*_*.deb 2>/dev/null | head -n 1)
[ -n "$package" ] || { echo "skip: no package was built: dpkg-dev is missing" && exit 77; }
package=$(realpath "$package")
. "$(dirname "$0")/common.bash"

# An image in which services must not start says so here; this is a copy of it with a systemd.
rm -f /usr/sbin/policy-rc.d

# Without what takes long and is no part of it: waiting for the disk, the manuals' index.
install_package() { dpkg --force-unsafe-io --no-triggers --force-confold -i "$package" >/dev/null; }

# Everything that `make install` installs, and who may do what with it.
holds_what_is_installed() {
    local wanted
    wanted=$(cd "$B/stage" && find . -type f -o -type l | sed -e 's|^\.||' -e '/\/man\//s|$|.gz|' | sort)
    equals "$(dpkg -L fused | grep -Fxf <(echo "$wanted") | sort)" "$wanted"
    equals "$(dpkg --verify fused)" ''
    equals "$(stat -c '%U %G %a' /run/fused)" 'fused fused 750'
    matches "$(getent passwd fused)" '^fused:.*:/usr/sbin/nologin$'
    # Its libraries come from packages that it names.
    fails grep -q 'not found' <<<"$(ldd /usr/bin/fused /usr/bin/fusectl /usr/lib/libfused.so.1)"
    matches "$(dpkg-query -W -f '${Depends}' fused)" 'libuv1 .*systemd'
}

starts_nothing_by_itself() {
    equals "$(systemctl is-enabled fused.socket || true)" disabled
    equals "$(systemctl is-active fused.socket fused.service || true)" $'inactive\ninactive'
}

serves() {
    systemctl enable --now fused.socket
    infer
    is SubState running
    equals "$(readlink "/proc/$(property MainPID)/exe")" /usr/bin/fused
}

builds_clients() {
    cp client/example.c "$place/"
    cc "$place/example.c" $(pkg-config --cflags --libs fused) -o "$place/example"
    matches "$(ldd "$place/example")" 'libfused.so.1 => /(usr/)?lib/libfused.so.1'
}

upgrade_refuses_nobody() {
    local pid
    pid=$(property MainPID)
    sed -i 's/^#log_level = .*/log_level = "debug";/' /etc/fused/fused.conf
    traffic 4
    sleep 0.5
    install_package
    soon 5 served_by_another "$pid"
    traffic_counts
    equals "$(field unanswered "$counts")" 0
    matches "$(cat /etc/fused/fused.conf)" '^log_level = "debug";'
}

# A daemon that is not running is not started by an upgrade.
upgrade_starts_nothing() {
    systemctl stop fused.socket fused.service
    install_package
    sleep 0.3
    equals "$(systemctl is-active fused.service || true)" inactive
}

removed_leaves_what_is_not_its_own() {
    systemctl start fused.socket
    infer
    dpkg --no-triggers --remove fused >/dev/null
    equals "$(pgrep -cx fused || true)" 0
    [ ! -e /usr/bin/fused ]
    [ ! -e /etc/systemd/system/sockets.target.wants/fused.socket ]
    [ -e /etc/fused/fused.conf ]
    dpkg --no-triggers --purge fused 2>/dev/null >/dev/null
    [ ! -e /etc/fused/fused.conf ]
    [ -e /var/lib/fused/weights/$model.safetensors ]
    [ -e /etc/fused/models.d/$model.conf ]
}

and_comes_back() {
    install_package
    systemctl start fused.socket
    infer
}

it "holds what make install installs" holds_what_is_installed
it "starts nothing by itself" starts_nothing_by_itself
it "serves from the package" serves
it "clients are built with it" builds_clients
it "an upgrade under load refuses nobody, and keeps the configuration" upgrade_refuses_nobody
it "an upgrade does not start what was stopped" upgrade_starts_nothing
it "removed and purged: what the administrator put there stays" removed_leaves_what_is_not_its_own
it "installed again: it serves" and_comes_back
finish
