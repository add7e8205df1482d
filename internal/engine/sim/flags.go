package sim

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/simflags"
	"github.com/dpserve/dpserve/internal/steptime"
)

// ParseFlags turns the command line of an engine into a Config. It takes vLLM's spelling (--name value,
// --name=value, bare --name and --no-name, several values behind a list flag) and vLLM's names; flags of vLLM
// that a simulation cannot use are accepted and returned, so that a file written for real engines runs
// unchanged.
func ParseFlags(args []string) (Config, []string, error) {
	p := &flagParser{cfg: Default(), rpcHost: defaultHost, dpRank: -1}
	p.cfg.Port = defaultPort
	p.cfg.PromptTokensDetails = false
	p.targets = p.settings()
	var ignored []string
	for len(args) > 0 {
		var name string
		var values []string
		name, values, args = nextFlag(args)
		known, err := p.set(name, values)
		if err != nil {
			return Config{}, nil, err
		}
		if !known {
			ignored = append(ignored, name)
		}
	}
	if err := p.finish(); err != nil {
		return Config{}, nil, err
	}
	return p.cfg, ignored, nil
}

// nextFlag cuts one flag with its values off args.
func nextFlag(args []string) (name string, values, rest []string) {
	name, rest = args[0], args[1:]
	if !strings.HasPrefix(name, "--") {
		return name, nil, rest
	}
	if flag, value, ok := strings.Cut(name, "="); ok {
		return flag, []string{value}, rest
	}
	for len(rest) > 0 && !strings.HasPrefix(rest[0], "--") {
		values, rest = append(values, rest[0]), rest[1:]
	}
	return name, values, rest
}

type flagParser struct {
	ranked  []simflags.Fault // for one rank of a group, which all get the same flags
	cfg     Config
	targets map[string]any
	rpcHost string
	rpcPort int
	dpRank  int    // -1 = not given
	law     string // "" = the reference model
	settled int    // block size after the load; 0 = as asked for
}

// set applies one flag; known is false for names this engine has no use for.
func (p *flagParser) set(name string, values []string) (known bool, err error) {
	if name == "-ep" {
		name = "--enable-expert-parallel"
	}
	long, isLong := strings.CutPrefix(name, "--")
	flag, isOff, known := simflags.Find(long)
	switch {
	case !known || !isLong:
		return false, nil
	case flag.Switch && len(values) > 0:
		return true, fmt.Errorf("%s: takes no value, got %q; --no-%s switches it off", name, values[0], long)
	case flag.Switch:
		if target, ok := p.targets[strings.TrimPrefix(long, "no-")].(*bool); ok {
			*target = !isOff
		}
		return true, nil
	case flag.Many:
		if len(values) == 0 {
			return true, fmt.Errorf("%s: want at least one name", name)
		}
		p.cfg.Names = values
		return true, nil
	case len(values) != 1:
		return true, fmt.Errorf("%s: want one value, got %d", name, len(values))
	}
	err = flag.Check(values[0])
	if err == nil {
		err = write(p.targets[long], values[0])
	}
	if err != nil {
		return true, fmt.Errorf("%s: cannot use %q: %w", name, values[0], err)
	}
	return true, nil
}

// settings are what the values of flags are written to, by the names of the flags.
func (p *flagParser) settings() map[string]any {
	c, m, kv, transfer := &p.cfg, &p.cfg.Model, &p.cfg.KVEvents, &p.cfg.Transfer
	return map[string]any{
		"host": &c.Host, "port": &c.Port, "model": &c.Root, "api-key": &c.APIKey, "seed": &c.Seed,
		"shutdown-timeout": &c.ShutdownTimeout, "sim-startup-s": &c.Startup, "sim-fail": p.fail,

		"enable-prompt-tokens-details": &c.PromptTokensDetails,
		"enable-force-include-usage":   &c.ForceIncludeUsage,
		"enable-request-id-headers":    &c.RequestIDHeaders,
		"enable-auto-tool-choice":      &c.AutoToolChoice,

		"max-num-seqs": &m.MaxSeqs, "max-model-len": &m.MaxModelLen, "block-size": &m.BlockSize,
		"num-gpu-blocks-override": &m.Blocks, "max-num-batched-tokens": &m.MaxBatchedTokens,
		"max-num-queued-reqs": &m.MaxQueuedReqs, "max-num-queued-tokens": &m.MaxQueuedTokens,
		"enable-prefix-caching": &m.PrefixCaching, "sim-settle-block-size": &p.settled,
		"sim-speed": &m.Speed, "sim-step-ms": p.fixedStep, "sim-law": &p.law,
		"sim-prompt-steps": &m.PromptSteps,

		"data-parallel-size": &c.DPSize, "data-parallel-rank": &p.dpRank,
		"data-parallel-address": &p.rpcHost, "data-parallel-rpc-port": &p.rpcPort,
		"tensor-parallel-size": &c.TensorParallel, "enable-expert-parallel": &c.ExpertParallel,
		"dp-sync-interval": &c.SyncInterval, "distributed-timeout-seconds": &m.CollectiveTimeout,
		"sim-internal-lb": &c.InternalLB, "sim-first-rank": &c.FirstRank, "sim-global-index": &c.GlobalIndex,
		"runner":    func(word string) error { c.Pooling = word == "pooling"; return nil },
		"sim-death": func(word string) error { m.NCCL = word == "nccl"; return nil },

		"kv-events-config": kv.parse, "prefix-caching-hash-algo": p.hashAlgo,
		"sim-kv-hash": &kv.Hash, "sim-kv-first-seq": &kv.FirstSeq,
		"sim-kv-sliding-window": &kv.SlidingWindow,

		"kv-transfer-config":           transfer.parse,
		"sim-transfer-token-bytes":     &transfer.TokenBytes,
		"sim-transfer-gbps":            &transfer.GBps,
		"sim-transfer-first-contact-s": &transfer.FirstContact,
		"sim-transfer-handshake-s":     &transfer.HandshakeMax,
	}
}

// write writes the value of a flag to its target.
func write(target any, value string) (err error) {
	switch target := target.(type) {
	case *string:
		*target = value
	case *KVHash:
		*target = KVHash(value)
	case *int:
		*target, err = strconv.Atoi(value)
	case *uint64:
		*target, err = strconv.ParseUint(value, 10, 64)
	case *float64:
		*target, err = strconv.ParseFloat(value, 64)
	case *time.Duration:
		var seconds float64
		seconds, err = strconv.ParseFloat(value, 64)
		*target = time.Duration(seconds * float64(time.Second))
	case func(string) error:
		return target(value)
	default:
		return errUnused
	}
	return err
}

// errUnused is a flag of the table of simflags that has no target.
var errUnused = errors.New("the simulated engine does not know it")

func (p *flagParser) fixedStep(text string) error {
	ms, err := strconv.ParseFloat(text, 64)
	p.cfg.Model.Fixed, p.cfg.Model.FixedStep = true, time.Duration(ms*float64(time.Millisecond))
	return err
}

func (p *flagParser) hashAlgo(name string) error {
	p.cfg.Hashing = em.Hashing{}
	if name == "sha256_cbor" {
		p.cfg.Hashing = em.Hashing{Algo: em.HashSHA256CBOR, Root: em.RootOf(defaultHashSeed)}
	}
	return nil
}

// fail takes a fault for every rank, or for one rank of a lockstep group. Ranks are compared when all flags
// are read.
func (p *flagParser) fail(text string) error {
	f, err := simflags.ParseFault(text)
	if err != nil {
		return err
	}
	if f.Rank >= 0 {
		p.ranked = append(p.ranked, f)
		return nil
	}
	return p.schedule(f)
}

func (p *flagParser) schedule(f simflags.Fault) error {
	switch f.Mode {
	case "start-exit":
		p.cfg.StartExit = true
		return nil
	case "start-exit-once":
		p.cfg.StartExitOnce = f.Argument
		return nil
	case "start-exit-while":
		p.cfg.StartExitWhile = f.Argument
		return nil
	case "start-hang":
		p.cfg.StartHang = true
		return nil
	}
	entry := Scheduled{
		After: time.Duration(f.AfterS * float64(time.Second)), Fault: Fault{Mode: Mode(f.Mode)},
	}
	if v, err := strconv.ParseFloat(f.Argument, 64); err == nil { // ParseFault has read it
		entry.Fault.setArgument(v)
	}
	p.cfg.Schedule = append(p.cfg.Schedule, entry)
	return entry.Fault.validate()
}

// finish derives what several flags decide together.
func (p *flagParser) finish() error {
	c := &p.cfg
	if p.settled > 0 {
		c.ReportedBlockSize, c.Model.BlockSize = c.Model.BlockSize, p.settled
	}
	for _, f := range p.ranked {
		if f.Rank != p.dpRank {
			continue
		}
		if err := p.schedule(f); err != nil {
			return fmt.Errorf("--sim-fail: cannot use %q: %w", f.Mode, err)
		}
	}
	switch {
	case p.dpRank >= 0:
		c.DPRank = p.dpRank
		if c.DPSize > 1 && p.rpcPort == 0 {
			p.rpcPort = defaultRPCPort
		}
		c.RPCAddr = hostPort(p.rpcHost, p.rpcPort)
	case c.DPSize > 1: // a size without a rank is vLLM's internal load balancing
		c.InternalLB, c.DPSize = c.DPSize, 0
	}
	if c.Model.Blocks == em.DefaultBlocks { // the memory stays, the blocks change their size
		c.Model.Blocks = em.DefaultBlocks * em.DefaultBlockSize / max(1, c.Model.BlockSize)
	}
	c.Model.Lockstep = c.lockstep()
	if err := p.applyLaw(); err != nil {
		return err
	}
	return c.Validate()
}

// lawExperts names the cost model of a mixture-of-experts model, whose ranks compute the experts together.
const lawExperts = "deepseek-v3"

// applyLaw sets how long steps take.
func (p *flagParser) applyLaw() error {
	m := &p.cfg.Model
	switch {
	case p.law != lawExperts || m.Fixed:
		return nil
	case !m.Lockstep:
		return fmt.Errorf("--sim-law %s is of lockstep groups: set coupling: lockstep, or leave sim_law out",
			p.law)
	}
	m.Law, p.cfg.Shared = steptime.DeepSeek(p.cfg.DPSize)
	return nil
}

const defaultRPCPort = 29550

// defaultHashSeed stands for an unset PYTHONHASHSEED: since 0.32.0 hashes are the same everywhere then too.
const defaultHashSeed = ""
