# Process 1 of a host, after init.sh: sets up the NICs, runs the command, and says its exit status on the console.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { printf '\001%s\n' "$1" > /dev/tty0; }
. /run/rxe/environment
ulimit -l unlimited
ulimit -n 65536
ulimit -c 0
hostname "host$HOST_INDEX"
cat /run/rxe/hosts >> /etc/hosts
ip link set lo up
nic=0
while [ $nic -lt "$NIC_COUNT" ]; do
  ip link set vec$nic name eth$nic
  for set in arp_ignore=1 arp_announce=2 rp_filter=0; do
    echo ${set#*=} > /proc/sys/net/ipv4/conf/eth$nic/${set%=*}
  done
  for set in accept_dad=0 dad_transmits=0 accept_ra=0 keep_addr_on_down=1; do
    echo ${set#*=} > /proc/sys/net/ipv6/conf/eth$nic/${set%=*}
  done
  eval v4=\$HOST_ADDR_${HOST_INDEX}_$nic v6=\$HOST_ADDR6_${HOST_INDEX}_$nic
  ip addr add "$v4/24" dev eth$nic
  ip addr add "$v6/64" dev eth$nic nodad
  ip link set eth$nic up
  rdma link add rxe$nic type rxe netdev eth$nic || say "fail no RDMA device on eth$nic"
  nic=$((nic + 1))
done
for folder in $HOST_WRITABLE; do
  mkdir -p "$folder"
  mount -t hostfs -o "$folder" writable "$folder" || say "fail cannot mount $folder"
done
mkfifo /run/rxe/output
cat /run/rxe/output > /dev/tty0 &
copier=$!
say boot
cd "$HOST_FOLDER" || cd /
setsid sh /run/rxe/command > /run/rxe/output 2>&1 < /dev/null
status=$?
for turn in 1 2 3 4 5; do  # until all output is on the console; processes that the command has left may hold the pipe
  kill -0 $copier 2>/dev/null || break
  sleep 0.2
done
sync
say "exit $status"
sleep 1000
