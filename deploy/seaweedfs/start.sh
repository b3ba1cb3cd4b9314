#!/bin/sh
# SeaweedFS made to keep what it has acknowledged (docs/adr/0007-embedded-stack.md), S3 alone reachable.
# Master, volume and filer have no authentication: they listen on the container's loopback only.
set -eu

unclean=/data/.running # found at a start: it was killed, or the power failed
ready=/tmp/durable     # what the health check waits for
rm -f "$ready"

if [ -e "$unclean" ] && ls /data/*.dat >/dev/null 2>&1; then
    weed fix -ignoreError /data # the index is never flushed; it is made again from the bytes
fi
touch "$unclean"

weed -logtostderr=true mini -dir=/data -ip=127.0.0.1 -ip.bind=127.0.0.1 -s3=false -webdav=false -admin.ui=false \
    -master.telemetry=false -master.volumeSizeLimitMB="${VOLUME_MB:-128}" \
    -filer.exposeDirectoryData=false -filer.ui.deleteDir=false &
store=$!
trap 'kill -TERM "$store" 2>/dev/null || true' TERM INT

# Every object's bytes are flushed before its PUT is answered; set before anybody may write.
until echo 'fs.configure -locationPrefix=/buckets/ -fsync=true -apply' |
    weed shell -master=127.0.0.1:9333 -filer=127.0.0.1:8888 2>&1 | grep -q '"fsync": *true'; do
    kill -0 "$store" || exit 1
    sleep 1
done

weed -logtostderr=true s3 -ip.bind=0.0.0.0 -port=8333 -port.iceberg=0 -port.lance=0 -filer=127.0.0.1:8888 \
    -config=/run/secrets/s3_identities -allowedOrigins=http://127.0.0.1 -autoCreateBucket=false &
door=$!
trap 'kill -TERM "$door" 2>/dev/null || true' TERM INT
touch "$ready"

# Either one's end is the end of both: the door first, so that nothing is acknowledged by half a server.
while kill -0 "$store" 2>/dev/null && kill -0 "$door" 2>/dev/null; do
    sleep 1 &
    wait $! || true # a signal ends the wait at once
done
rm -f "$ready"
kill -TERM "$door" 2>/dev/null || true
wait "$door" || true
clean=no
if kill -TERM "$store" 2>/dev/null; then
    clean=yes
    wait "$store" || clean=no
fi
# The indexes are durable before the mark goes.
[ "$clean" = no ] || { sync && rm -f "$unclean"; }
