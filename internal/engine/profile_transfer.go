package engine

import (
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// transferFlag is vLLM's flag with the settings of a connector. dpserve writes it for the ranks of a pool.
const transferFlag = "kv-transfer-config"

// bootstrapVar is the environment variable with the port of Mooncake's bootstrap server.
const bootstrapVar = "VLLM_MOONCAKE_BOOTSTRAP_PORT"

// transferLaunch is what the engine of a pool's rank gets for its transfers. args are the arguments of the
// file without those that are part of flags now.
type transferLaunch struct {
	flags, env []string
	args       app.Args
}

// transferOf renders the transfer of a rank: nothing for a rank that belongs to no pool.
func transferOf(s *Spec) (t transferLaunch, err error) {
	t.args = s.App.Engine.Args
	d := s.App.Disaggregation
	if s.App.Pool == "" || d == nil {
		return t, nil
	}
	isPrefill := s.App.Pool == app.PoolPrefill
	if d.Transfer == app.TransferSGLang {
		t.flags = []string{"--disaggregation-mode", s.App.Pool}
		if isPrefill {
			port := strconv.Itoa(s.portsOfRankZero().Bootstrap(0)) // one server for all ranks of a group
			t.flags = append(t.flags, "--disaggregation-bootstrap-port", port)
		}
		return t, nil
	}
	config, rest, err := transferConfig(s.App.Engine.Args)
	if err != nil {
		return t, err
	}
	role := "kv_consumer"
	if isPrefill {
		role = "kv_producer"
	} else if config["kv_load_failure_policy"] == nil {
		config["kv_load_failure_policy"] = failurePolicy(s.App)
	}
	config["kv_connector"], config["kv_role"] = connector(d.Transfer), role
	if s.App.Engine.Kind == app.KindVLLM && d.Transfer != app.TransferMooncake {
		t.env = nixlSettings(s, config)
	}
	b, err := json.Marshal(config)
	if err != nil {
		return t, transferFault(err)
	}
	t.flags, t.args = []string{"--" + transferFlag, string(b)}, rest
	if d.Transfer == app.TransferMooncake && isPrefill {
		t.env = []string{bootstrapVar + "=" + strconv.Itoa(s.Ports().Bootstrap(s.Index()))}
	}
	return t, nil
}

// failurePolicy is what a decode engine does when blocks do not come. vLLM computes the prompt itself where
// the application allows it. The simulated engine fails, so that dpserve's own way is seen and counted.
func failurePolicy(a *app.Application) string {
	if a.Engine.Kind == app.KindVLLM && a.Disaggregation.Fallback != app.FallbackFail {
		return "recompute"
	}
	return "fail"
}

// nixlLeaseS is kv_lease_duration of launched vLLM engines in seconds. The first handshake of two engines can
// take 30 s on a busy machine, and no heartbeat flows before its end.
const nixlLeaseS = 120

// nixlSettings completes config for a real engine and returns its environment. The engine adds its rank to
// the port. The simulated engine takes any free port instead, and its handshakes are quick.
func nixlSettings(s *Spec, config map[string]any) []string {
	const extra, lease = "kv_connector_extra_config", "kv_lease_duration"
	if inner, _ := config[extra].(map[string]any); inner[lease] == nil {
		setNested(config, extra+"."+lease, nixlLeaseS)
	}
	return []string{
		"VLLM_NIXL_SIDE_CHANNEL_HOST=" + s.reach(),
		"VLLM_NIXL_SIDE_CHANNEL_PORT=" + strconv.Itoa(s.Ports().SideChannel(0)),
	}
}

// connector is vLLM's name of a transfer. Simulated engines have NIXL's.
func connector(transfer string) string {
	switch transfer {
	case app.TransferNIXLPush:
		return "NixlPushConnector"
	case app.TransferMooncake:
		return "MooncakeConnector"
	default:
		return "NixlConnector"
	}
}

// transferConfig takes the settings of the transfer out of engine.args: a map, its JSON, or single settings
// behind dots.
func transferConfig(args app.Args) (config map[string]any, rest app.Args, err error) {
	config = map[string]any{}
	for _, a := range args {
		name, _, isSingle := strings.Cut(flagName(a.Name), ".")
		if name != transferFlag {
			rest = append(rest, a)
			continue
		}
		if isSingle {
			_, path, _ := strings.Cut(a.Name, ".") // the engine's own spelling
			setNested(config, path, a.Value)
			continue
		}
		switch v := a.Value.(type) {
		case map[string]any:
			maps.Copy(config, v)
		case string:
			err = json.Unmarshal([]byte(v), &config)
		default:
			err = fmt.Errorf("want a map, found %v", v)
		}
		if err != nil {
			return nil, nil, transferFault(err)
		}
	}
	return config, rest, nil
}

// setNested sets a value, whose place is path (keys behind dots), in a copy of the maps on its way.
func setNested(config map[string]any, path string, value any) {
	key, rest, isNested := strings.Cut(path, ".")
	if !isNested {
		config[key] = value
		return
	}
	old, _ := config[key].(map[string]any)
	inner := map[string]any{}
	maps.Copy(inner, old)
	setNested(inner, rest, value)
	config[key] = inner
}

func transferFault(err error) error {
	return problem.New(problem.InvalidArgument, "engine.args.kv_transfer_config: %w", err)
}

// TransferLease is how long an engine of the pool keeps a computed prompt for its decode rank, as the file or
// dpserve's own flags say; 0 = the default of the transfer.
func TransferLease(a *app.Application) time.Duration {
	config, _, err := transferConfig(a.Engine.Args)
	if err != nil {
		return 0
	}
	inner, _ := config["kv_connector_extra_config"].(map[string]any)
	switch v := inner["kv_lease_duration"].(type) {
	case int64:
		return time.Duration(v) * time.Second
	case float64:
		return time.Duration(v * float64(time.Second))
	}
	d := a.Disaggregation
	if a.Engine.Kind == app.KindVLLM && d != nil && d.Transfer != app.TransferMooncake {
		return nixlLeaseS * time.Second
	}
	return 0
}
