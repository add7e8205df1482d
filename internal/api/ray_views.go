package api

import (
	"cmp"
	"encoding/json"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	yaml "github.com/goccy/go-yaml"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// rayImportPath is the import_path of an application in dpserve's own form, which is in args. No Python is
// behind it.
const rayImportPath = "dpserve:app"

// rayActor names an actor of Ray: here a node, an ingress or a rank.
type rayActor struct {
	NodeID string `json:"node_id"`
	NodeIP string `json:"node_ip"`
}

// rayInstance is the answer of GET /api/serve/applications/. Ray's clients refuse keys that they do not know.
type rayInstance struct {
	Controller     any                       `json:"controller_info"` // rayActor; {} while no node leads
	Proxies        map[string]rayProxy       `json:"proxies"`
	Applications   map[string]rayApplication `json:"applications"`
	TargetCapacity *float64                  `json:"target_capacity"`
}

type rayProxy struct {
	rayActor
	Status string `json:"status"`
}

type rayApplication struct {
	Name           string                   `json:"name"`
	RoutePrefix    *string                  `json:"route_prefix"`
	DocsPath       *string                  `json:"docs_path"`
	Status         string                   `json:"status"`
	Message        string                   `json:"message"`
	LastDeployed   float64                  `json:"last_deployed_time_s"`
	DeployedConfig *rayAppConfig            `json:"deployed_app_config"`
	Source         string                   `json:"source"`
	Deployments    map[string]rayDeployment `json:"deployments"`
	ExternalScaler bool                     `json:"external_scaler_enabled"`
}

// rayAppConfig is an entry of Ray's file.
type rayAppConfig struct {
	Name        string          `json:"name"`
	RoutePrefix string          `json:"route_prefix"`
	ImportPath  string          `json:"import_path"`
	Args        json.RawMessage `json:"args"`
}

// rayDeployment is an application, or one of its pools.
type rayDeployment struct {
	Name          string              `json:"name"`
	Status        string              `json:"status"`
	StatusTrigger string              `json:"status_trigger"`
	Message       string              `json:"message"`
	Config        rayDeploymentConfig `json:"deployment_config"`
	Target        int                 `json:"target_num_replicas"`
	Resources     map[string]float64  `json:"required_resources"`
	Replicas      []rayReplica        `json:"replicas"`
}

type rayDeploymentConfig struct {
	Name        string `json:"name"`
	NumReplicas int    `json:"num_replicas"`
}

// rayReplica is a rank.
type rayReplica struct {
	rayActor
	ReplicaID string  `json:"replica_id"`
	State     string  `json:"state"`
	PID       *int    `json:"pid"`
	StartTime float64 `json:"start_time_s"`
}

// newRayInstance shows a cluster in Ray's shape. specs are the stored applications, with all of their pools.
func newRayInstance(
	apps []client.AppStatus, specs []*app.Application, nodes []client.NodeStatus,
) rayInstance {
	out := rayInstance{
		Controller: struct{}{}, Proxies: map[string]rayProxy{}, Applications: map[string]rayApplication{},
	}
	hosts := map[string]string{}
	for i := range nodes {
		n := &nodes[i]
		host, _, err := net.SplitHostPort(n.Address)
		if err != nil {
			host = n.Address
		}
		hosts[n.Node] = host
		actor := rayActor{n.Node, host}
		if n.Leader {
			out.Controller = actor
		}
		if slices.Contains(n.Roles, "ingress") {
			out.Proxies[n.Node] = rayProxy{actor, cmp.Or(rayProxyStates[n.State], "UNHEALTHY")}
		}
	}
	byName := map[string][]*app.Application{}
	for _, s := range specs {
		byName[s.Name] = append(byName[s.Name], s)
	}
	for i := range apps {
		out.Applications[apps[i].Name] = newRayApplication(&apps[i], byName[apps[i].Name], hosts)
	}
	return out
}

// addNotes shows the keys without effect in an application's message.
func (x *rayInstance) addNotes(name, text string) {
	a := x.Applications[name]
	a.Message = strings.TrimPrefix(a.Message+"; "+text, "; ")
	x.Applications[name] = a
}

func newRayApplication(
	a *client.AppStatus, pools []*app.Application, hosts map[string]string,
) rayApplication {
	out := rayApplication{
		Name: a.Name, Status: a.Status, Message: a.Message, Source: "declarative",
		LastDeployed: firstStart(a.Units), Deployments: map[string]rayDeployment{},
	}
	if len(pools) > 0 {
		out.RoutePrefix = &pools[0].RoutePrefix
	}
	if a.Status == client.StatusDeleting {
		return out
	}
	out.DeployedConfig = newRayConfig(pools)
	for _, p := range a.Pools {
		if pool, ok := a.OfPool(p.Name); ok {
			out.Deployments[p.Name] = newRayDeployment(&pool, hosts)
		}
	}
	if len(a.Pools) == 0 {
		out.Deployments[a.Name] = newRayDeployment(a, hosts)
	}
	return out
}

// firstStart is when the oldest phase of the units began: dpserve stores no time of a deploy.
func firstStart(units []client.UnitStatus) float64 {
	var first time.Time
	for i := range units {
		if first.IsZero() || units[i].Since.Before(first) {
			first = units[i].Since
		}
	}
	return raySeconds(first)
}

func raySeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// newRayConfig returns the entry by which PUT deploys an application again.
func newRayConfig(pools []*app.Application) *rayAppConfig {
	if len(pools) == 0 {
		return nil
	}
	var file struct {
		Applications []json.RawMessage `json:"applications"`
	}
	text, err := yaml.YAMLToJSON((&app.File{Applications: pools}).Print())
	if err != nil || json.Unmarshal(text, &file) != nil || len(file.Applications) != 1 {
		return nil
	}
	return &rayAppConfig{pools[0].Name, pools[0].RoutePrefix, rayImportPath, file.Applications[0]}
}

func newRayDeployment(a *client.AppStatus, hosts map[string]string) rayDeployment {
	words := rayStatuses[a.Status]
	out := rayDeployment{
		Name: a.Name, Status: words.deployment, StatusTrigger: words.trigger, Message: a.Message,
		Config: rayDeploymentConfig{a.Name, a.Desired}, Target: a.Desired,
		Resources: map[string]float64{}, Replicas: []rayReplica{},
	}
	for i := range a.Units {
		u := &a.Units[i]
		for j := range u.Ranks {
			r := &u.Ranks[j]
			word := rayReplicaStates[r.Phase]
			if word == "" {
				continue
			}
			replica := rayReplica{
				rayActor: rayActor{r.Node, hosts[r.Node]}, State: word, StartTime: raySeconds(u.Since),
				ReplicaID: u.Unit + "/" + strconv.Itoa(r.Rank),
			}
			if r.PID > 0 {
				replica.PID = &r.PID
			}
			out.Replicas = append(out.Replicas, replica)
		}
	}
	return out
}
