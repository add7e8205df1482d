package engine

import (
	"net"
	"slices"
	"strconv"

	"github.com/dpserve/dpserve/internal/app"
)

// sglangProfile renders SGLang. With DP attention (lockstep) one process per node hosts all ranks of its
// node, and the process of rank 0's node answers for the ranks of all nodes: requests name the rank by a
// header. Without, every rank is a process with one rank.
func sglangProfile(s *Spec, environ []string) (Launch, error) {
	a, port := s.App, s.Ports().HTTP(0)
	argv := append(Command(a),
		"--model-path", a.Model.Source, "--served-model-name", a.Model.ID,
		"--host", s.apiHost(), "--port", strconv.Itoa(port), "--dist-init-addr", distAddress(s))
	argv = append(argv, sglangRanks(s)...)
	for _, flag := range []string{"enable-metrics", "enable-cache-report"} {
		if _, ok := lookupArg(a.Engine.Args, flag); !ok {
			argv = append(argv, "--"+flag)
		}
	}
	argv = append(argv, shareFlags(a)...)
	adapters, err := adapterFlags(a, "--lora-paths", "lora_name", "lora_path")
	if err != nil {
		return Launch{}, err
	}
	events, err := eventFlags(s)
	if err != nil {
		return Launch{}, err
	}
	transfer, err := transferOf(s)
	if err != nil {
		return Launch{}, err
	}
	flags, err := sglangFlags(transfer.args)
	if err != nil {
		return Launch{}, err
	}
	var visible []int
	for _, seat := range s.seats() {
		visible = append(visible, seat.Devices...)
	}
	own := append(devices(visible), "SGLANG_TIMEOUT_KEEP_ALIVE="+strconv.Itoa(KeepAliveS))
	own = append(own, hostIP(s, "SGLANG_HOST_IP")...)
	l := Launch{
		Argv: slices.Concat(argv, adapters, events, transfer.flags, flags),
		Env:  realEnvironment(environ, own, a.Engine.Env, s.reach(), s.Rank0Addr),
		URL:  "http://" + net.JoinHostPort(s.apiHost(), strconv.Itoa(port)), Addressing: app.AddressURL,
		Events: launchedEvents(s),
	}
	if s.spans() && s.NodeRank > 0 {
		l.URL = "http://" + net.JoinHostPort(s.Rank0Addr, strconv.Itoa(s.portsOfRankZero().HTTP(0)))
	}
	if s.isLockstep() {
		l.Ranks = s.indices()
		if a.DataParallel.DPSize > 1 {
			l.Addressing, l.Selector = app.AddressHeader, s.Rank
		}
	}
	return l, nil
}

// distAddress is where the processes of the unit meet. SGLang chooses a port outside of the unit's block if
// it gets none.
func distAddress(s *Spec) string {
	at := s.Meeting()
	if s.Rank0Addr != "" {
		at = Bind{s.Rank0Addr, s.Rank0Port}
	}
	return net.JoinHostPort(at.Host, strconv.Itoa(at.Port))
}

// sglangRanks are the flags of DP attention. Every request names its rank, so the method of balancing does
// not matter, except that a prefill engine tells decode engines by its own default where a request went.
func sglangRanks(s *Spec) []string {
	if !s.isLockstep() {
		return nil
	}
	out := []string{"--dp-size", strconv.Itoa(s.App.DataParallel.DPSize)}
	if s.App.Pool != app.PoolPrefill {
		out = append(out, "--load-balance-method", "round_robin")
	}
	if s.spans() {
		out = append(out, "--nnodes", strconv.Itoa(s.Nodes), "--node-rank", strconv.Itoa(s.NodeRank))
	}
	return out
}

// sglangFlags renders engine.args. SGLang takes the items of a list as words of their own, and has no flags
// that switch something off which is off without them.
func sglangFlags(args app.Args) ([]string, error) {
	var out []string
	for i := range args {
		switch v := args[i].Value.(type) {
		case []any:
			out = append(out, listFlag(flagName(args[i].Name), v)...)
			continue
		case bool:
			if !v {
				continue
			}
		}
		flags, err := Flags(args[i : i+1])
		if err != nil {
			return nil, err
		}
		out = append(out, flags...)
	}
	return out, nil
}
