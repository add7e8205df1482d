package sim

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/simflags"
)

// ParseFlags turns the command line of an engine into a Config. It takes vLLM's spelling (--name value,
// --name=value, bare --name and --no-name, several values behind a list flag) and vLLM's names; flags of vLLM
// that a simulation cannot use are accepted and returned, so that a file written for real engines runs
// unchanged.
func ParseFlags(args []string) (Config, []string, error) {
	p := &flagParser{cfg: Default(), rpcHost: defaultHost, dpRank: -1}
	p.cfg.Port, p.cfg.Transfer.BootstrapPort = defaultPort, defaultBootstrap
	p.cfg.PromptTokensDetails = false
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
	rpcHost string
	rpcPort int
	dpRank  int // -1 = not given
	stepMS  *float64
	sha256  bool // sha256_cbor was asked for
	settled int  // block size after the load; 0 = as asked for
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
		if target := p.bools(strings.Replace(name, "--no-", "--", 1)); target != nil {
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
		err = p.take(name, values[0])
	}
	if err != nil {
		return true, fmt.Errorf("%s: cannot use %q: %w", name, values[0], err)
	}
	return true, nil
}

// take applies a value that the flag takes.
func (p *flagParser) take(name, value string) (err error) {
	if target := p.ints(name); target != nil {
		*target, err = strconv.Atoi(value)
		return err
	}
	if target := p.seconds(name); target != nil {
		v, err := strconv.ParseFloat(value, 64)
		*target = time.Duration(v * float64(time.Second))
		return err
	}
	if target := p.texts(name); target != nil {
		*target = value
		return nil
	}
	c := &p.cfg
	switch name {
	case "--seed":
		c.Seed, err = strconv.ParseUint(value, 10, 64)
	case "--sim-speed":
		c.Model.Speed, err = strconv.ParseFloat(value, 64)
	case "--sim-step-ms":
		p.stepMS = new(float64)
		*p.stepMS, err = strconv.ParseFloat(value, 64)
	case "--sim-death":
		c.Model.NCCL = value == "nccl"
	case "--sim-fail":
		return p.fail(value)
	case "--kv-events-config":
		return c.KVEvents.parse(value)
	case "--kv-transfer-config":
		return c.Transfer.parse(value)
	case "--disaggregation-mode":
		c.Transfer.disaggregation(value)
	case "--sim-transfer-gbps":
		c.Transfer.GBps, err = strconv.ParseFloat(value, 64)
	case "--prefix-caching-hash-algo":
		p.sha256 = value == "sha256_cbor"
	case "--sim-kv-format":
		c.KVEvents.Format = KVFormat(value)
	case "--sim-kv-hash":
		c.KVEvents.Hash = KVHash(value)
	case "--sim-kv-first-seq":
		c.KVEvents.FirstSeq, err = strconv.ParseUint(value, 10, 32)
	default:
		return errUnused
	}
	return err
}

// errUnused is a flag of the table that take does not know.
var errUnused = errors.New("the simulated engine does not know it")

func (p *flagParser) bools(name string) *bool {
	switch name {
	case "--enable-prompt-tokens-details":
		return &p.cfg.PromptTokensDetails
	case "--enable-force-include-usage":
		return &p.cfg.ForceIncludeUsage
	case "--enable-request-id-headers":
		return &p.cfg.RequestIDHeaders
	case "--enable-server-load-tracking":
		return &p.cfg.LoadTracking
	case "--enable-scale-out":
		return &p.cfg.ScaleOut
	case "--enable-auto-tool-choice":
		return &p.cfg.AutoToolChoice
	case "--enable-expert-parallel":
		return &p.cfg.ExpertParallel
	case "--sim-kv-sliding-window":
		return &p.cfg.KVEvents.SlidingWindow
	case "--enable-prefix-caching":
		return &p.cfg.Model.PrefixCaching
	}
	return nil
}

func (p *flagParser) ints(name string) *int {
	m := &p.cfg.Model
	switch name {
	case "--port":
		return &p.cfg.Port
	case "--max-num-seqs":
		return &m.MaxSeqs
	case "--max-model-len":
		return &m.MaxModelLen
	case "--block-size":
		return &m.BlockSize
	case "--num-gpu-blocks-override":
		return &m.Blocks
	case "--max-num-batched-tokens":
		return &m.MaxBatchedTokens
	case "--max-num-queued-reqs":
		return &m.MaxQueuedReqs
	case "--max-num-queued-tokens":
		return &m.MaxQueuedTokens
	case "--dp-sync-interval":
		return &p.cfg.SyncInterval
	case "--tensor-parallel-size":
		return &p.cfg.TensorParallel
	case "--data-parallel-size":
		return &p.cfg.DPSize
	case "--data-parallel-rank":
		return &p.dpRank
	case "--data-parallel-rpc-port":
		return &p.rpcPort
	case "--sim-internal-lb":
		return &p.cfg.InternalLB
	case "--sim-settle-block-size":
		return &p.settled
	case "--disaggregation-bootstrap-port":
		return &p.cfg.Transfer.BootstrapPort
	case "--sim-transfer-token-bytes":
		return &p.cfg.Transfer.TokenBytes
	}
	return nil
}

func (p *flagParser) texts(name string) *string {
	switch name {
	case "--host":
		return &p.cfg.Host
	case "--api-key":
		return &p.cfg.APIKey
	case "--model":
		return &p.cfg.Root
	case "--data-parallel-address":
		return &p.rpcHost
	}
	return nil
}

func (p *flagParser) seconds(name string) *time.Duration {
	switch name {
	case "--shutdown-timeout":
		return &p.cfg.ShutdownTimeout
	case "--distributed-timeout-seconds":
		return &p.cfg.Model.CollectiveTimeout
	case "--sim-startup-s":
		return &p.cfg.Startup
	case "--sim-transfer-first-contact-s":
		return &p.cfg.Transfer.FirstContact
	case "--sim-transfer-handshake-s":
		return &p.cfg.Transfer.HandshakeMax
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
	case "start-hang":
		p.cfg.StartHang = true
		return nil
	}
	entry := Scheduled{
		After: time.Duration(f.AfterS * float64(time.Second)), Fault: Fault{Mode: Mode(f.Mode)},
	}
	if err := entry.Fault.argument(f.Argument); err != nil {
		return err
	}
	p.cfg.Schedule = append(p.cfg.Schedule, entry)
	return entry.Fault.validate()
}

// finish derives what several flags decide together.
func (p *flagParser) finish() error {
	c := &p.cfg
	if p.settled > 0 {
		c.ToldBlockSize, c.Model.BlockSize = c.Model.BlockSize, p.settled
	}
	for _, f := range p.ranked {
		if f.Rank != p.dpRank {
			continue
		}
		if err := p.schedule(f); err != nil {
			return fmt.Errorf("--sim-fail: cannot use %q: %w", f.Mode, err)
		}
	}
	if p.stepMS != nil {
		c.Model.Fixed, c.Model.FixedStep = true, time.Duration(*p.stepMS*float64(time.Millisecond))
	}
	switch {
	case p.dpRank >= 0:
		c.DPRank = p.dpRank
		c.RPCAddr = net.JoinHostPort(p.rpcHost, strconv.Itoa(p.rpcPort))
		if c.DPSize > 1 && p.rpcPort == 0 {
			c.RPCAddr = net.JoinHostPort(p.rpcHost, strconv.Itoa(defaultRPCPort))
		}
	case c.DPSize > 1: // a size without a rank is vLLM's internal load balancing
		c.InternalLB, c.DPSize = c.DPSize, 0
	}
	blocks := enginemodel.DefaultBlocks * enginemodel.DefaultBlockSize / max(1, c.Model.BlockSize)
	if c.Model.Blocks == enginemodel.DefaultBlocks {
		c.Model.Blocks = blocks // the memory stays, the blocks change their size
	}
	c.Model.Lockstep = c.lockstep()
	if p.sha256 {
		c.Hashing = enginemodel.Hashing{
			Algo: enginemodel.HashSHA256CBOR,
			Root: enginemodel.RootOf(defaultHashSeed),
		}
	}
	return c.Validate()
}

const defaultRPCPort = 29550

// defaultHashSeed stands for an unset PYTHONHASHSEED: since 0.32.0 hashes are the same everywhere then too.
const defaultHashSeed = ""
