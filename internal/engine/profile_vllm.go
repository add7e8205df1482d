package engine

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// vllmProfile renders vLLM, one rank per process. Independent ranks are plain servers without any
// data-parallel flag: vLLM refuses those flags for dense models. The ranks of a lockstep group get the same
// flags except for rank, port and devices.
func vllmProfile(s *Spec, environ []string) (Launch, error) {
	a, port := s.App, s.Ports().HTTP(s.Index())
	argv := vllmModel(Command(a), a.Model.Source)
	argv = append(argv, "--served-model-name", a.Model.ID)
	argv = append(argv, a.Model.Aliases...)
	argv = append(argv, "--host", s.host(), "--port", strconv.Itoa(port))
	argv = append(argv, lockstepFlags(s)...)
	argv = append(argv, "--enable-prompt-tokens-details", "--shutdown-timeout", shutdownTimeout(a))
	argv = append(argv, shareFlags(a)...)
	rest, transfer, err := vllmRest(s)
	if err != nil {
		return Launch{}, err
	}
	own := append(devices(s.Devices), "VLLM_HTTP_TIMEOUT_KEEP_ALIVE="+strconv.Itoa(KeepAliveS))
	own = append(own, hostIP(s, "VLLM_HOST_IP")...)
	own = append(own, transfer.env...)
	return Launch{
		Argv: append(argv, rest...),
		Env:  realEnvironment(environ, own, a.Engine.Env, s.reach(), s.Rank0Addr),
		URL:  "http://" + s.hostPort(port), Addressing: app.AddressURL, Events: launchedEvents(s),
	}, nil
}

// vllmRest are the flags after those of the API: events, transfer, adapters and the file's own.
func vllmRest(s *Spec) (flags []string, transfer transferLaunch, err error) {
	if flags, err = eventFlags(s); err != nil {
		return nil, transfer, err
	}
	if transfer, err = transferOf(s); err != nil {
		return nil, transfer, err
	}
	adapters, err := adapterFlags(s.App, "--lora-modules", "name", "path")
	if err != nil {
		return nil, transfer, err
	}
	own, err := Flags(transfer.args)
	return slices.Concat(flags, transfer.flags, adapters, own), transfer, err
}

// vllmModel names the model behind the command. `vllm serve` takes it as its first word. The API server as a
// Python module takes a flag.
func vllmModel(command []string, source string) []string {
	if strings.HasSuffix(command[len(command)-1], "api_server") {
		return append(command, "--model", source)
	}
	return append(command, source)
}

// adapterFlags load the adapters of the model with an engine's flag, whose words are JSON objects with the
// members name and path. The ingress writes the engine's name of an adapter into each request.
func adapterFlags(a *app.Application, flag, name, path string) ([]string, error) {
	if len(a.Model.Adapters) == 0 {
		return nil, nil
	}
	var out []string
	if _, ok := lookupArg(a.Engine.Args, "enable-lora"); !ok {
		out = append(out, "--enable-lora")
	}
	out = append(out, flag)
	for _, adapter := range a.Model.Adapters {
		b, err := json.Marshal(map[string]string{name: adapter.ID, path: adapter.Source})
		if err != nil {
			return nil, problem.New(problem.InvalidArgument, "model.adapters: %w", err)
		}
		out = append(out, string(b))
	}
	return out, nil
}

// hostIP tells an engine that works with engines of other nodes its node's address. Without it, the engine
// takes that of the default route.
func hostIP(s *Spec, name string) []string {
	if s.Advertise == "" || !s.spans() && s.App.Pool == "" {
		return nil
	}
	return []string{name + "=" + s.Advertise}
}
