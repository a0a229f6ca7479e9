#!/bin/sh
# Process 1 of a host. Its root is this machine's file system, by hostfs, read-only; the host lives in an overlay above it.
# Argument: the folder with the files of this host that hosts.py has written.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
job=$1
new=/mnt/new
say() { printf '\001%s\n' "$1" > /dev/tty0; }
mount -t devtmpfs devtmpfs /dev 2>/dev/null
stty -F /dev/tty0 raw -echo
mount -t tmpfs -o mode=755 tmpfs /mnt && mkdir /mnt/up /mnt/work $new || say "fail no tmpfs"
mount -t overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work overlay $new || say "fail no overlay"
for folder in proc sys dev run tmp mnt; do mkdir -p $new/$folder; done
mount -t proc proc $new/proc
mount -t sysfs sysfs $new/sys
mount -t devtmpfs devtmpfs $new/dev
mkdir -p $new/dev/pts $new/dev/shm
ln -sfn /proc/self/fd $new/dev/fd
chmod 1777 $new/tmp
mount -t devpts devpts $new/dev/pts
mount -t tmpfs -o mode=1777 shm $new/dev/shm
mount -t tmpfs -o mode=755 tmpfs $new/run
mkdir -p $new/run/rxe $new/run/lock
cp "$job/environment" "$job/hosts" "$job/command" "$job/main.sh" $new/run/rxe/
exec chroot $new /bin/sh /run/rxe/main.sh
