#!/bin/sh
# Makes dist/kvtier_VERSION_ARCHITECTURE.deb on a Debian with python3-venv: kvtier in a virtual environment in /opt/kvtier,
# because Debian's gRPC and pydantic are older than kvtier needs. Manual pages and completions are made from the commands.
set -eu
umask 022
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
opt=$tree/opt/kvtier
usr=$tree/usr

/usr/bin/python3 -m venv "$opt"
"$opt/bin/pip" install -q --no-compile ".[daemon]"
version=$("$opt/bin/python" -c 'from importlib.metadata import version; print(version("kvtier"))')
site=$("$opt/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
minor=$("$opt/bin/python" -c 'import sys; print(sys.version_info.minor)')

install -d "$usr/bin" "$usr/share/doc" "$usr/lib/systemd/system" "$usr/share/zsh/vendor-completions" \
    "$usr/share/bash-completion/completions" "$usr/share/fish/vendor_completions.d"
_KVTIER_COMPLETE=bash_source "$opt/bin/kvtier" > "$usr/share/bash-completion/completions/kvtier"
_KVTIER_COMPLETE=zsh_source "$opt/bin/kvtier" > "$usr/share/zsh/vendor-completions/_kvtier"
_KVTIER_COMPLETE=fish_source "$opt/bin/kvtier" > "$usr/share/fish/vendor_completions.d/kvtier.fish"
/usr/bin/python3 -m venv "$work/tools"
"$work/tools/bin/pip" install -q click-man
PYTHONPATH=$site "$work/tools/bin/python" deploy/manpages.py "$usr/share/man" "$version"
gzip -9n "$usr"/share/man/man?/*

"$opt/bin/pip" uninstall -qy pip setuptools
grep -rlIF "$tree" "$opt/bin" "$opt/pyvenv.cfg" | xargs sed -i "s|$tree||g"
/usr/bin/python3 -m compileall -q -s "$tree" -p / "$site"
for command in kvtier kvtierd; do
    ln -s "/opt/kvtier/bin/$command" "$usr/bin/$command"
done

shared=$opt/share/kvtier/systemd
mv "$opt/share/doc/kvtier" "$usr/share/doc/kvtier"
install -m 644 LICENSE "$usr/share/doc/kvtier/copyright"
install -m 644 "$shared/kvtierd.service" "$usr/lib/systemd/system"
install -Dm 644 "$shared/sysusers.d/kvtier.conf" "$usr/lib/sysusers.d/kvtier.conf"
install -Dm 644 "$shared/tmpfiles.d/kvtier.conf" "$usr/lib/tmpfiles.d/kvtier.conf"
install -Dm 640 "$shared/kvtierd.toml" "$tree/etc/kvtier/kvtierd.toml"

install -d "$tree/DEBIAN"
echo /etc/kvtier/kvtierd.toml > "$tree/DEBIAN/conffiles"
cat > "$tree/DEBIAN/control" <<END
Package: kvtier
Version: $version
Architecture: $(dpkg --print-architecture)
Depends: python3 (>= 3.$minor), python3 (<< 3.$((minor + 1))), systemd
Installed-Size: $(du -sk "$tree" | cut -f1)
Section: admin
Priority: optional
Maintainer: The kvtier developers <kvtier@localhost>
Description: KV-cache tiers for LLM inference engines
 A daemon for each host that keeps KV-cache blocks in GPU, host and disk memory, its client for Python, and its commands.
END
cat > "$tree/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
systemd-sysusers kvtier.conf
systemd-tmpfiles --create kvtier.conf
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
[ -z "$2" ] || systemctl try-restart kvtierd
END
cat > "$tree/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
[ "$1" = remove ] && [ -d /run/systemd/system ] || exit 0
systemctl disable --now kvtierd
END
cat > "$tree/DEBIAN/postrm" <<'END'
#!/bin/sh
set -e
[ "$1" != purge ] || rm -rf /var/lib/kvtier
[ ! -d /run/systemd/system ] || systemctl daemon-reload
END
chmod 755 "$tree/DEBIAN/postinst" "$tree/DEBIAN/prerm" "$tree/DEBIAN/postrm"
install -d dist
dpkg-deb --root-owner-group -Zzstd --build "$tree" dist
