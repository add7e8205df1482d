package openai

import (
	"net/http"
	"slices"
	"strings"
)

// Effect is what a control call changes in the engine that dpserve must know of.
type Effect uint8

// The effects of control calls.
const (
	NoEffect      Effect = iota
	ChangesModels        // the engine lists other adapters afterwards
	Sleeps               // the engine computes nothing until a call that wakes it
	Wakes
	ClearsCache // the prefix cache is empty afterwards
)

// Control is a route that steers an engine. A client of the public endpoint never reaches it.
type Control struct {
	Path    string   // a last slash stands for all paths below it
	Methods []string // of a call through the admin port; none: dpserve passes no such call on
	Effect  Effect
}

// IsAllowed reports that the admin port passes the call on to ranks.
func (c *Control) IsAllowed() bool { return len(c.Methods) > 0 }

var (
	byPost = []string{http.MethodPost}
	byGet  = []string{http.MethodGet}
	byBoth = []string{http.MethodPost, http.MethodGet}
)

// controlCalls are the routes of vLLM and SGLang that steer an engine, or that show more of it than a client
// may see. Those without methods change weights or run code, or change the ranks that dpserve counts.
var controlCalls = []Control{
	// vLLM
	{Path: "/v1/load_lora_adapter", Methods: byPost, Effect: ChangesModels},
	{Path: "/v1/unload_lora_adapter", Methods: byPost, Effect: ChangesModels},
	{Path: "/sleep", Methods: byPost, Effect: Sleeps},
	{Path: "/wake_up", Methods: byPost, Effect: Wakes},
	{Path: "/is_sleeping", Methods: byGet},
	{Path: "/pause", Methods: byPost, Effect: Sleeps},
	{Path: "/resume", Methods: byPost, Effect: Wakes},
	{Path: "/is_paused", Methods: byGet},
	{Path: "/reset_prefix_cache", Methods: byPost, Effect: ClearsCache},
	{Path: "/reset_mm_cache", Methods: byPost},
	{Path: "/reset_encoder_cache", Methods: byPost},
	{Path: "/abort_requests", Methods: byPost},
	{Path: "/collective_rpc"},
	{Path: "/scale_elastic_ep"},
	{Path: "/is_scaling_elastic_ep"},
	{Path: "/init_weight_transfer_engine"},
	{Path: "/start_weight_update"},
	{Path: "/update_weights"},
	{Path: "/finish_weight_update"},
	{Path: "/get_world_size"},

	// both
	{Path: "/start_profile", Methods: byBoth},
	{Path: "/stop_profile", Methods: byBoth},
	{Path: "/server_info", Methods: byGet},

	// SGLang
	{Path: "/load_lora_adapter", Methods: byPost, Effect: ChangesModels},
	{Path: "/unload_lora_adapter", Methods: byPost, Effect: ChangesModels},
	{Path: "/release_memory_occupation", Methods: byBoth, Effect: Sleeps},
	{Path: "/resume_memory_occupation", Methods: byBoth, Effect: Wakes},
	{Path: "/pause_generation", Methods: byPost, Effect: Sleeps},
	{Path: "/continue_generation", Methods: byPost, Effect: Wakes},
	{Path: "/flush_cache", Methods: byBoth, Effect: ClearsCache},
	{Path: "/clear_hicache_storage_backend", Methods: byBoth},
	{Path: "/abort_request", Methods: byPost},
	{Path: "/get_server_info", Methods: byGet},
	{Path: "/get_internal_state"},
	{Path: "/set_internal_state"},
	{Path: "/load_lora_adapter_from_tensors"},
	{Path: "/update_weights_from_disk"},
	{Path: "/update_weights_from_distributed"},
	{Path: "/update_weights_from_ipc"},
	{Path: "/update_weights_from_tensor"},
	{Path: "/update_weight_version"},
	{Path: "/init_weights_update_group"},
	{Path: "/destroy_weights_update_group"},
	{Path: "/init_weights_send_group_for_remote_instance"},
	{Path: "/send_weights_to_remote_instance"},
	{Path: "/get_weights_by_name"},
	{Path: "/weights_checker"},
	{Path: "/configure_logging"},
	{Path: "/dumper/"},
	{Path: "/freeze_gc"},
	{Path: "/hicache/"},
	{Path: "/slow_down"},
	{Path: "/start_expert_distribution_record"},
	{Path: "/stop_expert_distribution_record"},
	{Path: "/dump_expert_distribution_record"},
	{Path: "/open_session"},
	{Path: "/close_session"},
}

// ControlOf finds the control call of a path; nil: the path steers no engine. The path has no route prefix,
// no query, and neither doubled slashes nor a last one.
func ControlOf(path string) *Control {
	i := slices.IndexFunc(controlCalls, func(c Control) bool {
		below := strings.HasSuffix(c.Path, "/") &&
			(strings.HasPrefix(path, c.Path) || path+"/" == c.Path)
		return below || c.Path == path
	})
	if i < 0 {
		return nil
	}
	return &controlCalls[i]
}

// AllowedControls are the paths of the calls that the admin port passes on, sorted.
func AllowedControls() []string {
	var out []string
	for i := range controlCalls {
		if controlCalls[i].IsAllowed() {
			out = append(out, controlCalls[i].Path)
		}
	}
	slices.Sort(out)
	return out
}
