package inprocess

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// byHand starts an engine by its command line, without dpserve. It ends with the test.
func (r *kvRig) byHand(args ...string) *sim.Server {
	r.t.Helper()
	cfg, _, err := sim.ParseFlags(args)
	require.NoError(r.t, err)
	cfg.Listen = func(_ context.Context, addr string) (net.Listener, error) { return r.Net.Listen(addr) }
	cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
		return r.Net.DialContext(ctx, "tcp", addr)
	}
	s := harness.StartSim(r.t, cfg)
	return s
}

// attached is an app.yaml of engines that run already.
func attached(name string, routing string, ranks ...string) string {
	text := fmt.Sprintf(`applications:
  - name: %[1]s
    model: {id: %[1]s}
    engine:
      kind: attach
      family: vllm
      ranks:
`, name)
	for _, rank := range ranks {
		text += "        - " + rank + "\n"
	}
	return text + "    " + routing + "\n"
}

// handPorts are where an engine by hand listens: API, events, replays.
func handPorts(i int) (api, events, replay string) {
	at := func(base int) string { return fmt.Sprintf("127.0.0.1:%d", base+i) }
	return at(8100), at(5600), at(5700)
}

// handFlags is the command line of engine i of an attached application; more follow. Without replays a gap
// cannot be filled.
func handFlags(i int, model string, replays bool, more ...string) []string {
	api, events, replay := handPorts(i)
	_, port, _ := net.SplitHostPort(api)
	_, pub, _ := net.SplitHostPort(events)
	set := map[string]any{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:" + pub}
	if replays {
		set["replay_endpoint"] = "tcp://" + replay
	}
	text, _ := json.Marshal(set)
	return slices.Concat([]string{
		"--port", port, "--served-model-name", model, "--enable-prompt-tokens-details", "--kv-events-config",
		string(text),
	}, more)
}
