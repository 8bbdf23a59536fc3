# shellcheck shell=bash
# A TPU host that Compute Engine makes: publishes which worker of its slice it is. Runs as root at every boot, before
# tpu_host.sh, which mounts the share.
#   SLICE_HOSTS    how many hosts the slice has       SHARE_SOURCE   SERVER:/PATH, or empty: there is no share

attribute() {
  local host=${GCE_METADATA_HOST:-metadata.google.internal}
  curl --silent --fail --noproxy '*' --max-time 5 --header 'Metadata-Flavor: Google' \
    "http://$host/computeMetadata/v1/instance/attributes/$1"
}

# Google writes the number under one of these names, some time after the host has booted.
worker_number() {
  local number
  for name in agent-worker-number worker-id; do
    number=$(attribute "$name") || number=''
    [[ ! $number =~ ^[0-9]+$ ]] || { printf '%s' "$number" && return; }
  done
  number=$(attribute tpu-env) || number=''
  sed -n "s/^ *\(TPU_\)\{0,1\}WORKER_ID: *[\"']\{0,1\}\([0-9]\{1,\}\).*/\2/p" <<<"$number" | head --lines 1
}

publish_worker_number() {
  local number='' until_s=$((SECONDS + 60))
  if ((SLICE_HOSTS == 1)); then
    number=0
  fi
  while [[ -z $number ]]; do
    number=$(worker_number)
    [[ -n $number ]] || ((SECONDS < until_s)) || break
    [[ -n $number ]] || sleep 5
  done
  if [[ -n $number ]]; then
    publish worker-id "$number"
  else
    say "no worker number in the metadata after 60 s; the order of the hosts' names counts"
  fi
}

need_settings SLICE_HOSTS
one_at_a_time
tell starting
publish_worker_number
if [[ -z ${SHARE_SOURCE:-} ]]; then
  tell yes
  say "ready: there is no share to mount"
  exit 0
fi
