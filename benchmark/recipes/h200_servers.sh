#!/usr/bin/env bash
# Both servers in the background, for several recipes in a row: a start costs up to two minutes.
#   h200_servers.sh start    then: export STOCK_URL=http://127.0.0.1:30001 GRANIKV_URL=http://127.0.0.1:30002
#   h200_servers.sh stop
# Two pairs on one host: CUDA_VISIBLE_DEVICES, STOCK_PORT, GRANIKV_PORT and LOGS of each pair's own.
. "$(dirname "$0")/h200.inc"
logs="${LOGS:-/tmp/granikv-servers}"
mkdir -p "$logs"
stock_port="${STOCK_PORT:-30001}" granikv_port="${GRANIKV_PORT:-30002}"

# begin NAME PORT FLAGS...: one server in the background.
begin() {
    local name="$1" port="$2"
    shift 2
    setsid nohup "$python" -m granikv_sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
        $both --max-total-tokens "$pool" "$@" > "$logs/$name.log" 2>&1 < /dev/null &
    echo $! > "$logs/$name.pid"
}

# wait_for NAME PORT: returns when it serves.
wait_for() {
    local name="$1" port="$2"
    until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=5)" 2> /dev/null; do
        if ! kill -0 "$(cat "$logs/$name.pid")" 2> /dev/null; then
            tail -n 20 "$logs/$name.log" >&2
            echo "h200_servers.sh: the $name server ended while starting; log: $logs/$name.log" >&2
            exit 1
        fi
        sleep 2
    done
    echo "$name serves on port $port"
}

case "${1:-}" in
start)
    begin stock "$stock_port" --granikv-off
    begin granikv "$granikv_port" ${GRANIKV_ARGS:-}
    wait_for stock "$stock_port"
    wait_for granikv "$granikv_port"
    ;;
stop)
    for name in granikv stock; do
        # Its own process group: setsid made it the leader.
        if [ -f "$logs/$name.pid" ]; then kill -TERM -- "-$(cat "$logs/$name.pid")" 2> /dev/null || true; fi
        rm -f "$logs/$name.pid"
    done
    ;;
*)
    echo "usage: h200_servers.sh start|stop" >&2
    exit 2
    ;;
esac
