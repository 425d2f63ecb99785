#!/bin/bash
# deb.sh VERSION MAINTAINER: a Debian package, $B/fused_VERSION_ARCH.deb, of what `make install DESTDIR=$B/deb/root PREFIX=/usr` has put
# there. Dependencies are those of the programs and of libfused, computed; fused-cuda.so is left out of that, because
# CUDA's libraries come from no package of Debian. The same tree gives the same bytes.
set -euo pipefail
version=$1
maintainer=$2
B=$(realpath "${B:-build}")
root=$B/deb/root
here=$(dirname "$(realpath "$0")")/debian
architecture=$(dpkg --print-architecture)
package=$B/fused_${version}_$architecture.deb
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}

# ---- files ----

strip --strip-unneeded --remove-section=.comment --remove-section=.note "$root"/usr/bin/* "$root"/usr/lib/libfused.so.1
strip --strip-debug "$root"/usr/lib/libfused.a
[ ! -e "$root/usr/lib/fused/fused-cuda.so" ] || strip --strip-unneeded "$root/usr/lib/fused/fused-cuda.so"
find "$root/usr/share/man" -type f -exec gzip -9n {} +
doc=$root/usr/share/doc/fused
install -m 644 "$here/copyright" "$doc/"
install -D -m 644 "$here/lintian-overrides" "$root/usr/share/lintian/overrides/fused"
gzip -9nc >"$doc/changelog.gz" <<CHANGELOG
fused ($version) stable; urgency=medium

  * Built from the sources by make deb.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
CHANGELOG

# ---- control ----

control=$root/DEBIAN
install -d -m 755 "$control" "$B/deb/debian"
printf 'Source: fused\n\nPackage: fused\nArchitecture: any\n' >"$B/deb/debian/control"
depends=$(cd "$B/deb" && dpkg-shlibdeps -O root/usr/bin/fused root/usr/bin/fusectl root/usr/lib/libfused.so.1)
depends=${depends#shlibs:Depends=}
size=$(du -k -s --apparent-size --exclude=DEBIAN "$root" | cut -f 1)
sed -e "s|@VERSION@|$version|" -e "s|@ARCHITECTURE@|$architecture|" -e "s|@MAINTAINER@|$maintainer|" -e "s|@SIZE@|$size|" -e "s|@DEPENDS@|$depends|" \
    "$here/control" >"$control/control"
for script in postinst prerm postrm; do install -m 755 "$here/$script" "$control/"; done
(cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$control/conffiles"
printf 'activate-noawait ldconfig\n' >"$control/triggers"
printf 'libfused 1 fused (>= %s)\n' "$version" >"$control/shlibs"
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$control/md5sums"
chmod 644 "$control"/{control,conffiles,triggers,shlibs,md5sums}

find "$root" -print0 | xargs -0 touch -h -d "@$SOURCE_DATE_EPOCH"
dpkg-deb --root-owner-group -Zxz --build "$root" "$package" >/dev/null
echo "$package"
