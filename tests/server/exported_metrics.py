"""Read the metrics that a server exports."""

from prometheus_client.parser import text_string_to_metric_families

from tests.server.front_end import FrontEnd
from tests.server.running_server import RunningServer


def families(server: FrontEnd | RunningServer) -> dict[str, object]:
    with server.client() as http:
        return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
